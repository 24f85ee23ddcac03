"""Measure variants of pair products and softmaxes, bf16, B 4096, lengths 1...400, D 128, T 16.

    PYTHONPATH=$PWD:$PWD/benchmarks/variants/pairs python benchmarks/variants/pairs/measure.py [op ...]     ops: pairs array soft2 soft

Kernels are first compiled by processes side by side (--warm), on small inputs.
"""
import os, subprocess, sys, time, traceback
START = time.time()
HERE = os.path.dirname(os.path.abspath(__file__))
BUDGET = float(os.environ.get("BUDGET", 75))
WORKERS = 10
import torch
from torchrec_jagged_attn.kernels import interaction, jagged_products

def make(batch, longest, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (batch,), device="cuda", generator=g)
    o = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    n, po = int(o[-1]), jagged_products.pair_offsets(o, o)
    new = lambda *s: torch.randn(*s, device="cuda", generator=g, dtype=torch.bfloat16)
    total = int(po[-1])
    return dict(o=o, po=po, n=n, total=total, x=new(n, 128), y=new(n, 128), p=new(total), t=new(n, 16))

def variants(ops):
    """(op, name, function of the inputs, floor in bytes of the inputs)."""
    out = []
    def guarded(module, add):
        try: add(__import__(module))
        except Exception: traceback.print_exc()
    def current():
        out.append(("pairs", "current", lambda d: jagged_products.pair_bmm(d["x"], d["y"], d["o"], d["o"], d["po"], d["total"])))
        out.append(("array", "current", lambda d: jagged_products.array_jagged_bmm(d["p"], d["y"], d["o"], d["o"], d["po"], d["n"], False)))
        out.append(("soft2", "current", lambda d: interaction.softmax(d["p"], d["po"], d["o"])))
        out.append(("soft", "current", lambda d: interaction.softmax(d["t"], d["o"], None)))
    current()
    def soft2g(m):
        for k in m.VARIANTS: out.append(("soft2", k, lambda d, k=k: m.run(k, d["p"], d["po"], d["o"])))
    def products(m):
        for k in m.HELD: out.append(("pairs", k, lambda d, k=k: m.held(k, d["x"], d["y"], d["o"], d["o"], d["po"], d["total"])))
        for k in m.ROWS: out.append(("array", k, lambda d, k=k: m.rows(k, d["p"], d["y"], d["o"], d["o"], d["po"], d["n"])))
    def prodg(m):
        for k in m.PAIRS: out.append(("pairs", k, lambda d, k=k: m.pairs(k, d["x"], d["y"], d["o"], d["o"], d["po"], d["total"])))
        for k in m.ARRAY: out.append(("array", k, lambda d, k=k: m.array(k, d["p"], d["y"], d["o"], d["o"], d["po"], d["n"])))
    def cols(m):
        for k in m.HELD: out.append(("soft", k, lambda d, k=k: m.held(k, d["t"], d["o"])))
        for k in m.OLD: out.append(("soft", k, lambda d, k=k: m.old(k, d["t"], d["o"])))
    def soft2(m):
        for k in ("vectors span4096", "vectors span8192 two rows"):
            out.append(("soft2", k, lambda d, k=k: m.run(k, d["p"], None, d["po"], d["o"])))
    guarded("soft2g", soft2g); guarded("products", products); guarded("prodg", prodg); guarded("cols", cols); guarded("soft2", soft2)
    return [v for v in out if not ops or v[0] in ops]

def warm(part, ops):
    d = make(12, 400, 1)
    for op, name, run in variants(ops)[part::WORKERS]:
        try: run(d); torch.cuda.synchronize()
        except Exception as error:
            print(f"WARM {op} / {name}: {type(error).__name__}: {str(error)[-600:]}", flush=True)

FLUSH = None
def timed(run, reps=15):
    """Median microseconds of a CUDA graph of it, with the L2 cache evicted before."""
    global FLUSH
    if FLUSH is None: FLUSH = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    run(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): kept = run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps + 3)]
    for a, b in pairs:
        FLUSH.zero_(); a.record(); graph.replay(); b.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) * 1e3 for a, b in pairs[3:])
    return times[len(times) // 2]

def compare(out, ref):
    worst, wrong = 0.0, 0
    for a, b in zip(out.flatten().split(1 << 26), ref.flatten().split(1 << 26)):
        a, b = a.float(), b.float()
        scale = b.abs().mean()
        bad = ~((a - b).abs() <= 0.02 * b.abs() + 0.02 * scale)
        wrong += int(bad.sum()); worst = max(worst, float((a - b).abs().max()))
    return worst, wrong

def main(ops):
    children = [subprocess.Popen([sys.executable, os.path.join(HERE, "measure.py"), f"--warm={k}", *ops]) for k in range(WORKERS)]
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    d = make(4096, 400)
    e, n, total = 2, d["n"], d["total"]
    bytes_of = {"pairs": (2 * n * 128 + total) * e, "array": (2 * n * 128 + total) * e, "soft2": 2 * total * e, "soft": 2 * n * 16 * e}
    listed = variants(ops)
    for child in children:
        try: child.wait(timeout=max(1, BUDGET - 20 - (time.time() - START)))
        except subprocess.TimeoutExpired: child.kill()
    print(f"compiled after {time.time() - START:.0f} s", flush=True)
    big = torch.empty(1 << 29, dtype=torch.uint8, device="cuda"); other = torch.empty_like(big)
    us = timed(lambda: other.copy_(big)); rate = 2 * big.numel() / us  # bytes / µs
    small = torch.empty(1, device="cuda")
    print(f"copy {rate / 1e6:.2f} TB/s, one tiny kernel {timed(lambda: small.zero_()):.1f} µs, N {n}, pairs {total}")
    for op in ("pairs", "array", "soft2", "soft"):
        if ops and op not in ops: continue
        half = torch.empty(bytes_of[op] // 2, dtype=torch.uint8, device="cuda"); to = torch.empty_like(half)
        floor = bytes_of[op] / rate
        print(f"\n{op}: {bytes_of[op] / 1e6:.0f} MB, floor {floor:.1f} µs, a copy of as many bytes {timed(lambda: to.copy_(half)):.1f} µs", flush=True)
        del half, to
        ref = None
        for of, name, run in listed:
            if of != op: continue
            if time.time() - START > BUDGET: print("  out of time:", name); continue
            try:
                out = run(d); torch.cuda.synchronize()
                if ref is None: ref = out; note = ""
                else:
                    worst, wrong = compare(out, ref); note = f"largest difference {worst:.3g}, {'ok' if wrong == 0 else f'WRONG in {wrong}'}"
                    if wrong == 0: note += ", bitwise" if torch.equal(out, ref) else ""
                del out
                us = timed(run)
                print(f"  {name:45s} {us:7.1f} µs  {floor / us:4.0%} of the floor  {note}", flush=True)
            except Exception as error:
                print(f"  {name:45s} {type(error).__name__}: {str(error)[-300:]}", flush=True)
                if "CUDA" in str(error) or "illegal" in str(error).lower():
                    try: torch.cuda.synchronize()
                    except Exception:  # the context is gone: go on in a new process, without this variant
                        rest = [o for o in ("pairs", "array", "soft2", "soft") if (not ops or o in ops)]
                        rest = rest[rest.index(op) + 1:]
                        print("  context lost; other ops in a new process:", rest, flush=True)
                        if rest: subprocess.run([sys.executable, os.path.join(HERE, "measure.py"), *rest])
                        return
    print(f"\n{time.time() - START:.0f} s")

if __name__ == "__main__":
    args = [a for a in sys.argv[1:] if not a.startswith("--")]
    part = [int(a[7:]) for a in sys.argv[1:] if a.startswith("--warm=")]
    warm(part[0], args) if part else main(args)
