"""Short samples, all variants: on the GPU machine, from the repository root:
   PYTHONPATH=$PWD:$PWD/benchmarks/variants/short python benchmarks/variants/short/measure.py [seconds]
Microseconds of a call within a CUDA graph of several (inputs of one call are larger than L2)."""
import os, sys, time, traceback
import torch
from torchrec_jagged_attn.kernels import flash_attention as fa, flash_hopper as fh, flash_hopper_backward as fhb
from torchrec_jagged_attn.kernels.launch import launches_overlap, overlap_options
from torchrec_jagged_attn.testing import offsets_of
import short_hopper as SH, short_triton as ST, prepare2

START, LIMIT = time.time(), float(sys.argv[1]) if len(sys.argv) > 1 else 70.0
DRY = bool(os.environ.get("SHORT_DRY"))
DEV = "cpu" if DRY else "cuda"
DTYPE = torch.float16 if DRY else torch.bfloat16
H, D = (2, 64) if DRY else (4, 64)
SCALE = D ** -0.5
FACTOR = abs(SCALE) * fa.LOG2E.value
CALLS = 5

def timed(fn):
    """Median microseconds of one call."""
    if DRY:
        fn(); return 0.0
    fn(); torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        fn(); torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS): fn()
        times = []
        for _ in range(13):
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record(); graph.replay(); b.record(); b.synchronize()
            times.append(a.elapsed_time(b) * 1e3 / CALLS)
    return sorted(times)[len(times) // 2]

def inputs(B, L, seed=1):
    lengths = torch.randint(1, L + 1, (B,), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(int(lengths.sum()), H, D, device=DEV, dtype=DTYPE) for _ in range(4))
    return q, k, v, do, offsets_of(lengths, torch.int64, DEV), lengths

# ------------------------------------------------------- kernels of short samples, as variants
def cur_f(block=32, warps=None):
    def run(q, k, v, out, stats, qo, ko):
        fa._forward_short(((qo.numel() - 1) * H,), (q, k, v, out, stats, qo, ko, stats[0].numel(), FACTOR),
            {"H": H, "HK": H, "D": D, "DV": D, "Q_STRIDE": q.stride(0), "K_STRIDE": k.stride(0), "V_STRIDE": v.stride(0),
             "CAUSAL": False, "NEGATIVE": False, "BLOCK_D": 64, "BLOCK_DV": 64, "BLOCK": block,
             "num_warps": warps or 1, **overlap_options(launches_overlap(q.device))})
    return run

def cur_b(block=32, warps=None):
    def run(do, q, k, v, gq, gk, gv, qo, ko):
        fa._backward_short(((qo.numel() - 1) * H,), (do, q, k, v, gq, gk, gv, qo, ko, FACTOR, SCALE),
            {"H": H, "HK": H, "D": D, "DV": D, "Q_STRIDE": q.stride(0), "K_STRIDE": k.stride(0), "V_STRIDE": v.stride(0),
             "CAUSAL": False, "NEGATIVE": False, "BLOCK_D": 64, "BLOCK_DV": 64, "GRAD_K_STRIDE": gk.stride(0),
             "GRAD_V_STRIDE": gv.stride(0), "BLOCK": block, "num_warps": warps or 1,
             **overlap_options(launches_overlap(q.device))})
    return run

def f(module, **o): return lambda *a: module.forward(*a, FACTOR, False, 64, **o)
def b(module, **o): return lambda *a: module.backward(*a, FACTOR, SCALE, False, 64, **o)
def both(*kernels):
    def run(*a):
        for kernel in kernels: kernel(*a)
    return run

F32 = {  # samples of 1 to 32 rows
    "current": cur_f(),
    "hopper 16/32, 4 items": f(SH),
    "hopper 16/32, 4 items, 152 regs": f(SH, maxnreg=152),
    "triton 16/32": f(ST),
    "hopper 16/32, 8 items, 152 regs": f(SH, per_program=8, maxnreg=152),
    "hopper 16/32, 16 items, 152 regs": f(SH, per_program=16, maxnreg=152),
    "hopper 16, 32 apart, 4 items": both(f(SH, block=16), f(SH, low=16, maxnreg=152)),
    "triton 32": f(ST, small=False),
    "triton 16, 32 apart": both(f(ST, block=16, small=False), f(ST, low=16, small=False)),
    "hopper 32, 4 items": f(SH, small=False),
    "hopper 16/32, 4 items, 128 regs": f(SH, maxnreg=128),
    "hopper 16/32, 2 items, 152 regs": f(SH, per_program=2, maxnreg=152),
    "triton 16/32, 4 heads ahead": f(ST, heads=4, stages=2),
}
B32 = {
    "current": cur_b(),
    "hopper 16/32, 1 stage, 4 items": b(SH, stages=1),
    "hopper 16/32, 2 stages, 4 items": b(SH, stages=2),
    "triton 16, 32 apart": both(b(ST, block=16, small=False), b(ST, low=16, small=False)),
    "hopper 16 (2), 32 (1) apart": both(b(SH, block=16, stages=2), b(SH, low=16, stages=1, small=False)),
    "hopper 16 (2), 32 (2) apart": both(b(SH, block=16, stages=2), b(SH, low=16, stages=2, small=False)),
    "triton 16/32": b(ST),
    "hopper 16/32, 2 stages, 16 items": b(SH, stages=2, per_program=16),
    "hopper 16/32, 1 stage, 1 item": b(SH, stages=1, per_program=1),
    "hopper 16 (1), 32 (1) apart, 1 item": both(b(SH, block=16, stages=1, per_program=1), b(SH, low=16, stages=1, small=False, per_program=1)),
    "triton 32": b(ST, small=False),
    "triton 16/32, 168 regs": b(ST, maxnreg=168),
}
F64 = {  # samples of 33 to 64 rows; "current" takes all up to 64
    "triton 64": f(ST, low=32, block=64, small=False),
    "hopper 64, 4 items": f(SH, low=32, block=64),
    "hopper 64, 4 items, 80 regs": f(SH, low=32, block=64, maxnreg=80),
    "hopper 64, 8 items, 80 regs": f(SH, low=32, block=64, per_program=8, maxnreg=80),
    "hopper 64, 2 items, 80 regs": f(SH, low=32, block=64, per_program=2, maxnreg=80),
    "current kernel, 64": cur_f(64, 4),
}
B64 = {
    "triton 64": b(ST, low=32, block=64, small=False),
    "hopper 64, 1 stage, 4 items": b(SH, low=32, block=64, stages=1),
    "hopper 64, 1 stage, 1 item, 128 regs": b(SH, low=32, block=64, stages=1, per_program=1, maxnreg=128),
    "hopper 64, 1 stage, 4 items, 128 regs": b(SH, low=32, block=64, stages=1, maxnreg=128),
    "hopper 64, 2 stages, 4 items": b(SH, low=32, block=64, stages=2),
    "triton 64, 128 regs": b(ST, low=32, block=64, small=False, maxnreg=128),
    "current kernel, 64": cur_b(64, 4),
}

# ------------------------------------------------------- the whole op
def op_forward(q, k, v, qo, shorts, SHORT):
    old, fa.SHORT = fa.SHORT, SHORT
    try:
        call = fa._Call(q, k, v, qo, qo, None, None, None, None, None, False, SCALE)
    finally: fa.SHORT = old
    out, stats = torch.empty_like(q), q.new_empty([2, *q.shape[:2]], dtype=torch.float32)
    tiles = call.list_tiles(fh.BLOCK_M, of_keys=False)
    for short in shorts: short(q, k, v, out, stats, qo, qo)
    fh.forward(*call.inputs, out, stats, tiles, call.factor, False, 64)
    return out, stats

def op_backward(do, q, k, v, qo, out, stats, shorts, SHORT, new_prepare):
    old, fa.SHORT = fa.SHORT, SHORT
    try:
        call = fa._Call(q, k, v, qo, qo, None, None, None, None, None, False, SCALE)
    finally: fa.SHORT = old
    gq, gk, gv = (torch.empty_like(x) for x in (q, k, v))
    tiles = call.list_tiles(fhb.BLOCK_N, of_keys=True, together=call.together)
    def short():
        for one in shorts: one(do, q, k, v, gq, gk, gv, qo, qo)
    prepare = fhb._prepare
    if new_prepare:
        def prepare2_then_short(grid, arguments, constants):
            grid = (min(grid[0], fh.multiprocessors(q.device) * 16),)
            slots = q.shape[0] // fhb.BLOCK_M + call.num_samples
            prepare2.launch(grid, (*arguments[:8], tiles, arguments[8], slots), constants)
            short()
        fhb._prepare = prepare2_then_short
    else: short()
    try:
        fhb.backward(*call.inputs, out, stats, gq, do, gk, gv, qo, qo, tiles, call.factor, SCALE, False, 64, call.short)
    finally: fhb._prepare = prepare
    return gq, gk, gv

def err(a, r): return ((a.float() - r.float()).norm() / r.float().norm().clamp(min=1e-9)).item()

def main():
    best = {}
    for shape, (B, L) in {"self-32": (24, 32) if DRY else (8192, 32), "self-64": (12, 64) if DRY else (4096, 64)}.items():
        q, k, v, do, qo, lengths = inputs(B, L)
        out0, stats0 = fa.forward(q, k, v, qo, qo, None, None, None, None, None, False, SCALE)
        gk0, gv0 = torch.empty_like(k), torch.empty_like(v)
        gq0 = fa.backward(do, q, k, v, qo, qo, None, None, None, None, None, out0, stats0, gk0, gv0, False, SCALE)[0]
        mib = (lambda n: n * q.numel() * 2 / 1e6)
        print(f"== {shape} B {B} N {q.shape[0]}; bytes: forward {mib(4):.0f} MB, backward {mib(7):.0f} MB", flush=True)
        half = B // 2
        first = int(qo[half])
        rest = [x[first:] for x in (q, k, v, do)]
        qo2 = qo[half:] - qo[half]
        tables = (("forward", "32", F32), ("backward", "32", B32)) if L == 32 else (("forward", "64", F64), ("backward", "64", B64))
        row_length = lengths.to(q.device).repeat_interleave(lengths.to(q.device))
        for way, cls, table in tables:
            print(f"-- {way}, kernels for samples of {'1..32' if cls == '32' else '33..64'} rows alone: us, error, bitwise same in half a batch", flush=True)
            for name, kernel in table.items():
                if time.time() - START > LIMIT: print("(out of time)"); break
                try:
                    low = 32 if cls == "64" and not name.startswith("current") else 0
                    take = (row_length <= int(cls)) & (row_length > low)
                    if way == "forward":
                        out, stats = torch.full_like(q, 7), torch.full_like(stats0, 7)
                        run = lambda: kernel(q, k, v, out, stats, qo, qo)
                        run()
                        got, ref = (out, stats[0]), (out0, stats0[0])
                        out2, stats2 = torch.full_like(rest[0], 7), torch.full([2, *rest[0].shape[:2]], 7.0, device=DEV)
                        kernel(*rest[:3], out2, stats2, qo2, qo2)
                        alone = (out2, stats2[0])
                    else:
                        got, ref = tuple(torch.full_like(x, 7) for x in (q, k, v)), (gq0, gk0, gv0)
                        run = lambda: kernel(do, q, k, v, *got, qo, qo)
                        run()
                        alone = tuple(torch.full_like(x, 7) for x in rest[:3])
                        kernel(rest[3], *rest[:3], *alone, qo2, qo2)
                    errors = [err(a[take], r[take]) for a, r in zip(got, ref)]
                    clean = all(bool((a[~take] == 7).all()) for a in got)
                    same = all(torch.equal(a[first:], x) for a, x in zip(got, alone))
                    us = timed(run)
                    again = all(torch.equal(a[first:], x) for a, x in zip(got, alone))
                    ok = max(errors) < 4e-3 and clean and same and again
                    print(f"{us:8.1f}  {name:40s} {'ok ' if ok else 'WRONG'} {['%.1e' % e for e in errors]} clean {clean} same {same and again}", flush=True)
                    if ok and not name.startswith("current") and us < best.get((way, cls), (1e9,))[0]:
                        best[way, cls] = us, name, kernel
                except Exception as error:
                    print(f"    FAIL  {name}: {str(error)[-300:]!r}", flush=True)
                    if "CUDA error" in str(error) or "illegal" in str(error): raise
        print("-- whole op, forward then backward, us", flush=True)
        f32, b32 = best.get(("forward", "32")), best.get(("backward", "32"))
        f64, b64 = best.get(("forward", "64")), best.get(("backward", "64"))
        combos = {"current": ([cur_f()], [cur_b()], 32, False), "current, new prepare": ([cur_f()], [cur_b()], 32, True)}
        if f32 and b32: combos[f"32: {f32[1]} | {b32[1]}"] = ([f32[2]], [b32[2]], 32, True)
        if f32 and b32 and f64 and b64:
            combos[f"64: {f64[1]} | {b64[1]}"] = ([f64[2], f32[2]], [b64[2], b32[2]], 64, True)
        for name, (fs, bs, SHORT, new) in combos.items():
            try:
                out, stats = op_forward(q, k, v, qo, fs, SHORT)
                grads = op_backward(do, q, k, v, qo, out, stats, bs, SHORT, new)
                errors = [err(a, r) for a, r in zip((out, *grads), (out0, gq0, gk0, gv0))]
                tf = timed(lambda: op_forward(q, k, v, qo, fs, SHORT))
                tb = timed(lambda: op_backward(do, q, k, v, qo, out, stats, bs, SHORT, new))
                print(f"{tf:8.1f} {tb:8.1f} {tf + tb:8.1f}  {name}  {'ok' if max(errors) < 4e-3 else 'WRONG'} {['%.1e' % e for e in errors]}", flush=True)
            except Exception as error:
                print(f"    FAIL  {name}: {str(error)[-300:]!r}", flush=True)
                if "CUDA error" in str(error) or "illegal" in str(error): raise
    print(f"{time.time() - START:.0f} s")

WORKERS = 8

def warm(index):
    """Compile a share of all kernels, into Triton's cache, on a small batch."""
    q, k, v, do, qo, lengths = inputs(64, 64)
    out, stats = torch.empty_like(q), q.new_empty([2, *q.shape[:2]], dtype=torch.float32)
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    jobs = [lambda: op_forward(q, k, v, qo, [], 32)]
    for SHORT, new in ((32, False), (32, True), (64, True)):
        jobs.append(lambda SHORT=SHORT, new=new: op_backward(do, q, k, v, qo, out, stats, [], SHORT, new))
    jobs.append(lambda: op_forward(q, k, v, qo, [], 64))
    jobs += [lambda x=x: x(q, k, v, out, stats, qo, qo) for t in (F32, F64) for x in t.values()]
    jobs += [lambda x=x: x(do, q, k, v, *grads, qo, qo) for t in (B32, B64) for x in t.values()]
    for job in jobs[index::WORKERS]:
        try: job()
        except Exception: pass
    torch.cuda.synchronize()

if __name__ == "__main__" and not DRY:
    if "SHORT_WARM" in os.environ:
        warm(int(os.environ["SHORT_WARM"]))
    else:
        import subprocess
        workers = [subprocess.Popen([sys.executable, __file__], env=os.environ | {"SHORT_WARM": str(i)},
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for i in range(WORKERS)]
        for worker in workers:
            try: worker.wait(timeout=60)
            except subprocess.TimeoutExpired: worker.kill()
        print(f"compiled by {time.time() - START:.0f} s", flush=True)
        main()
