"""Measure pairs_tma.py, bf16, B 4096, lengths 1...400, D 128, after small checks.

    PYTHONPATH=$PWD:$PWD/benchmarks/variants/pairs python benchmarks/variants/pairs/measure.py [part of a variant's name ...]

Each variant runs in a process of its own: one that hangs or faults costs the others nothing.
"""
import os, random, subprocess, sys, time, traceback
START = time.time()
HERE = os.path.dirname(os.path.abspath(__file__))
PER_VARIANT = float(os.environ.get("PER_VARIANT", 30))
sys.path.insert(0, HERE)
import torch
from torchrec_jagged_attn.kernels import jagged_products
import pairs_tma

RATE, GUARD = 4.25e6, 4096

def offsets(lengths):
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

def make(batch, longest, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (batch,), device="cuda", generator=g)
    o = offsets(lengths)
    n, po = int(o[-1]), jagged_products.pair_offsets(o, o)
    new = lambda *s: torch.randn(*s, device="cuda", generator=g, dtype=torch.bfloat16)
    return dict(o=o, po=po, n=n, total=int(po[-1]), x=new(n, 128), y=new(n, 128))

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
        wrong += int(bad.sum()); worst = max(worst, float((a - b).abs().max()) if a.numel() else 0.0)
    return worst, wrong

def small(name):
    """Lengths of all kinds, none too, against a loop; what lies before and after stays as it is."""
    rng = random.Random(0)
    special = [0, 1, 2, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 200, 399, 400, 415, 416, 417, 512, 700, 1100]
    for B, dtype in ((1, torch.bfloat16), (5, torch.float16), (40, torch.bfloat16), (160, torch.bfloat16)):
        xl, yl = (torch.tensor([rng.choice(special) if rng.random() < .5 else rng.randint(0, 420) for _ in range(B)], device="cuda") for _ in range(2))
        xo, yo = offsets(xl), offsets(yl)
        po = jagged_products.pair_offsets(xo, yo); total = int(po[-1])
        x, y = (torch.randn(int(l.sum()), 128, device="cuda", dtype=dtype) for l in (xl, yl))
        held = torch.full((2 * GUARD + total,), 12345, device="cuda", dtype=torch.int16)
        out = held[GUARD:GUARD + total].view(dtype)
        pairs_tma.run(name, x, y, xo, yo, po, total, out); torch.cuda.synchronize()
        rest = torch.cat([held[:GUARD], held[GUARD + total:]])
        assert bool((rest == 12345).all()), "writes beyond the output"
        xs, ys = x.split(xl.tolist()), y.split(yl.tolist())
        ref = torch.cat([(a.float() @ b.float().T).to(dtype).flatten() for a, b in zip(xs, ys)])
        worst, wrong = compare(out, ref)
        if wrong:
            bad = ((out.float() - ref.float()).abs() > 0.02 * ref.float().abs() + 0.02 * ref.float().abs().mean()).nonzero().flatten()
            samples = torch.searchsorted(po, bad[:2000], right=True) - 1
            print("   first wrong at", bad[:8].tolist(), "samples", samples.unique().tolist()[:12], [(int(xl[i]), int(yl[i])) for i in samples.unique().tolist()[:12]])
        assert wrong == 0, f"B {B}: {wrong} of {total} wrong, by up to {worst}"

def one(name):
    small(name); print(f"    small checks passed after {time.time() - START:.0f} s", flush=True)
    d = make(4096, 400)
    call = lambda: pairs_tma.run(name, d["x"], d["y"], d["o"], d["o"], d["po"], d["total"])
    floor = (2 * d["n"] * 128 + d["total"]) * 2 / RATE
    ref = jagged_products.pair_bmm(d["x"], d["y"], d["o"], d["o"], d["po"], d["total"])
    out = call(); torch.cuda.synchronize()
    worst, wrong = compare(out, ref)
    note = f"largest difference {worst:.3g}, {'ok' if wrong == 0 else f'WRONG in {wrong}'}{', bitwise' if torch.equal(out, ref) else ''}"
    del out, ref
    us = timed(call)
    tiles = pairs_tma.list_tiles(d["o"], d["o"], d["n"] // 128 + 4096, 0, 128)
    lists = timed(lambda: pairs_tma.list_tiles(d["o"], d["o"], d["n"] // 128 + 4096, 0, 128))
    print(f"  {name:45s} {us:7.1f} µs  {floor / us:4.0%} of the floor of {floor:.1f} µs  {note}  (of it the list: about {lists:.1f} µs)", flush=True)

def main(parts):
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    d = make(4096, 400)
    us = timed(lambda: jagged_products.pair_bmm(d["x"], d["y"], d["o"], d["o"], d["po"], d["total"]))
    floor = (2 * d["n"] * 128 + d["total"]) * 2 / RATE
    print(f"  {'current':45s} {us:7.1f} µs  {floor / us:4.0%} of the floor of {floor:.1f} µs", flush=True)
    del d; torch.cuda.empty_cache()
    for name in pairs_tma.VARIANTS:
        if parts and not any(p in name for p in parts): continue
        try:
            done = subprocess.run([sys.executable, os.path.abspath(__file__), "--one=" + name], timeout=PER_VARIANT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print(done.stdout[-3000:].rstrip() if done.returncode else done.stdout.rstrip(), flush=True)
            if done.returncode: print(f"  {name}: exit status {done.returncode}", flush=True)
        except subprocess.TimeoutExpired as late:
            print(f"  {name}: stopped after {PER_VARIANT:.0f} s", (late.stdout or b"")[-1500:], flush=True)
    print(f"{time.time() - START:.0f} s")

if __name__ == "__main__":
    names = [a[6:] for a in sys.argv[1:] if a.startswith("--one=")]
    one(names[0]) if names else main(sys.argv[1:])
