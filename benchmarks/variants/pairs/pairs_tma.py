"""Pair products on Hopper: rows by TMA, results by bulk copies of contiguous images. D = 128, bf16/fp16.

A program stays on its multiprocessor and takes units of 64·G rows of x of one sample. One warp brings
in rows: x by 64 for each of G groups of four warps, y by BN in a ring that all groups read. A group
keeps its 64 rows of x in registers, multiplies them with tile after tile of y, and scatters results
into an image of that part of the output in shared memory: whole rows one after the other, beginning
where the output begins modulo 16 bytes. Its whole 16-byte vectors are then written by one bulk copy,
and up to seven elements at either end by two bytes. Where a sample has more columns than an image of
64 rows takes (CAP), columns are cut into parts, whose rows are written by a bulk copy each.
"""
import functools, re
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait)
from torchrec_jagged_attn.kernels.flash_hopper import END, _hear, _jagged_rows, _tell, multiprocessors
from torchrec_jagged_attn.kernels.flash_schedule import FIELDS, list_tiles
from torchrec_jagged_attn.kernels.launch import Launcher, launches_overlap, overlap_options
from torchrec_jagged_attn.kernels.warp_tiles import wait_for_last_kernel

MAGIC = gl.constexpr(0x5EED1234)  # written where the images begin, for the code to be searched for

# $1: two elements side by side, $2 (and $3): where they go in shared memory, $4: at an odd element?
SCATTER = gl.constexpr("""{
.reg .pred p; .reg .b32 h;
setp.eq.s32 p, $4, 0; shr.u32 h, $1, 16;
@p st.shared.b32 [$2], $1;
@!p st.shared.b16 [$2], $1;
@!p st.shared.b16 [$2+2], h; // $0 $3 $5
}""")
# and $6, $7: how many elements there are, from each of them on
SCATTER_EDGE = gl.constexpr("""{
.reg .pred p, q, w; .reg .b32 h;
setp.gt.s32 p, $6, 0; setp.gt.s32 q, $7, 0; setp.eq.and.s32 w, $4, 0, q; shr.u32 h, $1, 16;
@w st.shared.b32 [$2], $1;
not.pred w, w; and.pred p, p, w; and.pred q, q, w;
@p st.shared.b16 [$2], $1;
@q st.shared.b16 [$2+2], h; // $0 $3 $5
}""")
BULK = gl.constexpr("""{
.reg .pred p;
setp.gt.s32 p, $3, 0;
@p cp.async.bulk.global.shared::cta.bulk_group [$2], [$1], $3;
cp.async.bulk.commit_group; // $0
}""")
ELEMENT = gl.constexpr("""{
.reg .pred p; .reg .b16 h;
setp.ne.s32 p, $3, 0;
@p ld.shared.b16 h, [$1];
@p st.global.b16 [$2], h; // $0
}""")


@gluon.jit
def shared_memory():
    """Where shared memory begins."""
    return gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def scatter(tile, addr, odd):
    gl.inline_asm_elementwise(SCATTER, "=r,r,r,r,r,r", [tile, addr, odd], dtype=gl.int16, is_pure=False, pack=2)


@gluon.jit
def scatter_edge(tile, addr, odd, left):
    gl.inline_asm_elementwise(SCATTER_EDGE, "=r,r,r,r,r,r,r,r", [tile, addr, odd, left], dtype=gl.int16, is_pure=False, pack=2)


@gluon.jit
def copy_bulk(source, target, size):
    """Begin to copy bytes from shared to global memory, where there are any."""
    gl.inline_asm_elementwise(BULK, "=r,r,l,r", [source, target, size], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_element(source, target, there):
    gl.inline_asm_elementwise(ELEMENT, "=r,r,l,r", [source, target, there.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def address_of(ptr):
    return ptr.to(gl.int64, bitcast=True)


@gluon.jit
def _wait_full(bars, n, STAGES: gl.constexpr):
    mbarrier.wait(bars.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def _wait_empty(bars, n, STAGES: gl.constexpr):
    mbarrier.wait(bars.index(n % STAGES), (n // STAGES + 1) & 1)


@gluon.jit
def _fields(tiles_ptr, work, num_work):
    """``(sample, row, count, base, num_n)`` of a unit, or of the first one if there is no such."""
    tile_ptr = tiles_ptr + (1 + gl.where(work < num_work, work, 0)) * FIELDS
    sample = gl.load(tile_ptr).to(gl.int32)
    row = gl.load(tile_ptr + 1).to(gl.int32)
    count = gl.load(tile_ptr + 2).to(gl.int32)
    base = gl.load(tile_ptr + 3).to(gl.int32)
    num_n = gl.load(tile_ptr + 4).to(gl.int32)
    return sample, row, count, base, num_n


@gluon.jit
def _bring(x_desc, y_desc, xs, x_full, x_empty, ys, y_full, y_empty, places, tiles_ptr, x_offsets_ptr,
           pair_offsets_ptr, G: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr):
    """What one warp does."""
    if OVERLAP:
        wait_for_last_kernel()
    num_work = gl.load(tiles_ptr).to(gl.int32)
    work = gl.program_id(0)
    following = gl.num_programs(0) + gl.atomic_add(tiles_ptr + 1, 1, sem="relaxed").to(gl.int32)
    n = work * 0
    turn = work * 0
    if num_work > 0:
        sample, row, count, base, num_n = _fields(tiles_ptr, work, num_work)
        while work < num_work:
            x_begin = gl.load(x_offsets_ptr + sample).to(gl.int32)
            first = gl.load(pair_offsets_ptr + sample).to(gl.int64) + (row - x_begin).to(gl.int64) * num_n
            for g in gl.static_range(G):
                mbarrier.wait(x_empty.index(g), (turn + 1) & 1)
            low, high = (first & 0xFFFFFFF).to(gl.int32), (first >> 28).to(gl.int32)
            _tell(places, turn, (count, num_n, low, high), 1)
            for g in gl.static_range(G):
                rest = count - g * 64
                if rest > 0:
                    mbarrier.expect(x_full.index(g), x_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(x_desc, [END, row + count, END - rest, 0, 0], x_full.index(g), xs.index(g))
                else:
                    mbarrier.arrive(x_full.index(g))
            end, other = base + num_n, num_n
            # What comes next is read while this is on its way.
            work = following
            sample, row, count, base, num_n = _fields(tiles_ptr, work, num_work)
            following = gl.num_programs(0) + gl.atomic_add(tiles_ptr + 1, 1, sem="relaxed").to(gl.int32)
            for start in range(0, other, BN):
                _wait_empty(y_empty, n, STAGES)
                full = y_full.index(n % STAGES)
                mbarrier.expect(full, y_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(y_desc, [END, end, END - (other - start), 0, 0], full, ys.index(n % STAGES))
                n += 1
            turn += 1
    for g in gl.static_range(G):
        mbarrier.wait(x_empty.index(g), (turn + 1) & 1)
    _tell(places, turn, (work * 0 - 1, work * 0, work * 0, work * 0), 1)
    for g in gl.static_range(G):
        mbarrier.arrive(x_full.index(g))


@gluon.jit
def _write(image, out, first, phase, length):
    """Write ``length`` elements of an image, from element ``phase`` on, to ``first + phase`` of ``out``."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    t = gl.arange(0, 128, lanes)
    begin, end = phase, phase + length
    a0 = (begin + 7) // 8 * 8
    a1 = end // 8 * 8
    size = gl.where(t == 0, gl.maximum(a1 - a0, 0) * 2, 0)
    at = gl.where(t < 8, t, a1 + t - 8)
    there = (at >= gl.where(t < 8, begin, gl.maximum(a0, a1))) & (at < gl.where(t < 8, gl.minimum(a0, end), end)) & (t < 16)
    copy_bulk(image + a0 * 2 + t, out + (first + a0) * 2 + t, size)  # of the first lane
    copy_element(image + at * 2, out + (first + at) * 2, there)


@gluon.jit
def _write_rows(image, out, first, phase, rows, pitch, width, stride):
    """Write each row of an image by itself: row ``i``, from element ``phase + i · pitch`` on, goes to
    element ``first + phase + i · stride``, and ``stride - pitch`` is a multiple of 8."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    t = gl.arange(0, 128, lanes)
    begin = phase + t * pitch
    end = begin + width
    a0 = (begin + 7) // 8 * 8
    a1 = end // 8 * 8
    shift = first + t.to(gl.int64) * (stride - pitch)
    size = gl.where(t < rows, gl.maximum(a1 - a0, 0) * 2, 0)
    copy_bulk(image + a0 * 2, out + (shift + a0) * 2, size)
    for e in range(0, 8):
        copy_element(image + (begin + e) * 2, out + (shift + begin + e) * 2, (t < rows) & (begin + e < gl.minimum(a0, end)))
        tail = gl.maximum(a0, a1) + e
        copy_element(image + tail * 2, out + (shift + tail) * 2, (t < rows) & (tail < end))


@gluon.jit
def _multiply(out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, GROUP: gl.constexpr, TEAM: gl.constexpr,
              TEAMS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CAP: gl.constexpr, IMAGES: gl.constexpr):
    """What four warps do: one of a group's TEAMS, which take turns with tiles of y; the first one writes."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    WIDTH: gl.constexpr = CAP // BN * BN - (BN if CAP % BN < 7 else 0)  # of a part of the columns
    image = shared_memory() + (IMAGES + GROUP * (CAP * 64 + 8) * 2)
    out = address_of(out_ptr)
    r = gl.arange(0, 64, gl.SliceLayout(1, mma))
    c = gl.arange(0, BN, gl.SliceLayout(0, mma))
    zeros = gl.zeros([64, BN], gl.float32, mma)
    nothing = gl.full([64, BN], 0, gl.int32, mma)
    n = image * 0
    turn = image * 0
    m = image * 0  # images so far
    mbarrier.wait(x_full.index(GROUP), 0)
    count, num_n = _hear(places, turn, 0, 1), _hear(places, turn, 1, 1)
    low, high = _hear(places, turn, 2, 1), _hear(places, turn, 3, 1)
    while count >= 0:
        rows = gl.minimum(count - GROUP * 64, 64)
        if rows <= 0:
            gl.thread_barrier()  # all have heard
            mbarrier.arrive(x_empty.index(GROUP))
            for k in range((TEAM - n) & (TEAMS - 1), gl.cdiv(num_n, BN), TEAMS):
                _wait_full(y_full, n + k, STAGES)
                mbarrier.arrive(y_empty.index((n + k) % STAGES))
        else:
            a = xs.index(GROUP).reshape([64, 128]).load(operand)
            gl.thread_barrier()
            mbarrier.arrive(x_empty.index(GROUP))
            first = (high.to(gl.int64) << 28) + low + (num_n * (GROUP * 64)).to(gl.int64)
            whole = num_n <= CAP
            part = gl.where(whole, num_n, WIDTH)
            pitch = gl.where(whole, num_n, WIDTH + num_n % 8)
            for begin in range(0, num_n, gl.maximum(part, 1)):
                end = gl.minimum(begin + part, num_n)
                phase = ((first + begin) & 7).to(gl.int32)
                at = phase + r * pitch
                row_addr = image + at * 2
                odd = (at & 1)[:, None] + nothing
                own = begin + ((TEAM - n - begin // BN) & (TEAMS - 1)) * BN  # this team's first column
                if TEAMS > 1:
                    if TEAM == 0:
                        tma.store_wait(0)
                        mbarrier.arrive(free.index(GROUP))
                for k in range(own, end, TEAMS * BN):
                    tile_n = n + k // BN
                    _wait_full(y_full, tile_n, STAGES)
                    y = ys.index(tile_n % STAGES).reshape([BN, 128])
                    acc = warpgroup_mma(a, y.permute((1, 0)), zeros, use_acc=False, is_async=True)
                    acc, a = warpgroup_mma_wait(0, deps=(acc, a))
                    mbarrier.arrive(y_empty.index(tile_n % STAGES))
                    tile = acc.to(xs.dtype)
                    if k == own:  # the last image has been read
                        if TEAMS > 1:
                            mbarrier.wait(free.index(GROUP), m & 1)
                        else:
                            tma.store_wait(0)
                            gl.thread_barrier()
                    addr = (row_addr + (k - begin) * 2)[:, None] + (c * 2)[None, :]
                    if k + BN <= end:
                        scatter(tile, addr, odd)
                    else:
                        scatter_edge(tile, addr, odd, (end - k - c)[None, :] + nothing)
                fence_async_shared()
                gl.thread_barrier()
                if TEAMS > 1:
                    if own >= end:  # it has not been waited for that
                        mbarrier.wait(free.index(GROUP), m & 1)
                    mbarrier.arrive(done.index(GROUP))
                    if TEAM == 0:
                        mbarrier.wait(done.index(GROUP), m & 1)
                m += 1
                if TEAM == 0:
                    origin = first + begin - phase
                    if whole:
                        _write(image, out, origin, phase, rows * num_n)
                    else:
                        _write_rows(image, out, origin, phase, rows, pitch, end - begin, num_n)
        n += gl.cdiv(num_n, BN)
        turn += 1
        mbarrier.wait(x_full.index(GROUP), turn & 1)
        count, num_n = _hear(places, turn, 0, 1), _hear(places, turn, 1, 1)
        low, high = _hear(places, turn, 2, 1), _hear(places, turn, 3, 1)
    tma.store_wait(0)


@gluon.jit
def pairs_kernel(out_ptr, x_desc, y_desc, tiles_ptr, x_offsets_ptr, pair_offsets_ptr,
                 G: gl.constexpr, TEAMS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CAP: gl.constexpr,
                 IMAGES: gl.constexpr, OVERLAP: gl.constexpr):
    """IMAGES: where in shared memory the images lie, see ``place_of_images``."""
    dtype: gl.constexpr = x_desc.dtype
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    xs = gl.allocate_shared_memory(dtype, [G] + x_desc.block_type.shape, x_desc.layout)
    ys = gl.allocate_shared_memory(dtype, [STAGES] + y_desc.block_type.shape, y_desc.layout)
    images = gl.allocate_shared_memory(gl.int32, [G * (CAP * 32 + 4), 1], plain)
    places = gl.allocate_shared_memory(gl.int32, [4, 1], plain)
    x_full = gl.allocate_shared_memory(gl.int64, [G, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [G, 1], mbarrier.MBarrierLayout())
    y_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    y_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [G, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [G, 1], mbarrier.MBarrierLayout())
    images.index(0).store(gl.full([1], MAGIC, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    for g in gl.static_range(G):
        mbarrier.init(x_full.index(g), count=1)
        mbarrier.init(x_empty.index(g), count=TEAMS)
        mbarrier.init(done.index(g), count=TEAMS)
        mbarrier.init(free.index(g), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(y_full.index(stage), count=1)
        mbarrier.init(y_empty.index(stage), count=G)
    if TEAMS == 2:
        gl.warp_specialize(
            [(_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 0, 0, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 0, 1, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 1, 0, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 1, 1, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_bring, (x_desc, y_desc, xs, x_full, x_empty, ys, y_full, y_empty, places, tiles_ptr, x_offsets_ptr,
                      pair_offsets_ptr, G, BN, STAGES, OVERLAP))], [4, 4, 4, 1], [112, 112, 112, 40])
    elif G == 2:
        gl.warp_specialize(
            [(_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 0, 0, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 1, 0, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_bring, (x_desc, y_desc, xs, x_full, x_empty, ys, y_full, y_empty, places, tiles_ptr, x_offsets_ptr,
                      pair_offsets_ptr, G, BN, STAGES, OVERLAP))], [4, 1], [232, 40])
    else:
        gl.warp_specialize(
            [(_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 0, 0, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 1, 0, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_multiply, (out_ptr, xs, x_full, x_empty, ys, y_full, y_empty, done, free, places, 2, 0, TEAMS, BN, STAGES, CAP, IMAGES)),
             (_bring, (x_desc, y_desc, xs, x_full, x_empty, ys, y_full, y_empty, places, tiles_ptr, x_offsets_ptr,
                      pair_offsets_ptr, G, BN, STAGES, OVERLAP))], [4, 4, 1], [152, 152, 40])
    images._keep_alive()


VARIANTS = {  # G, TEAMS, BN, STAGES (even, if there are two teams), CAP
    "2 groups x64, y64 x5, cap 416": (2, 1, 64, 5, 416),
    "2 groups x64, two teams, y64 x4, cap 416": (2, 2, 64, 4, 416),
    "2 groups x64, two teams, y32 x10, cap 416": (2, 2, 32, 10, 416),
    "3 groups x64, y32 x3, cap 400": (3, 1, 32, 3, 400),
    "2 groups x64, y128 x2, cap 416": (2, 1, 128, 2, 416),
}


def place_of_images(llir):
    """Where in shared memory the images begin: where LLVM's code stores MAGIC."""
    (line,) = [line for line in llir.splitlines() if f"i32 {MAGIC.value})" in line and "store" in line]
    if "getelementptr" not in line:
        assert "ptr addrspace(3) @global_smem" in line, line
        return 0
    return int(re.search(r"@global_smem, i(?:32|64) (\d+)\)", line).group(1))


_launch = {}  # by dtype: a launcher does not ask for that of a descriptor
_images = {}


def _start(name, out, x, y, x_offsets, pair_offsets, tiles, images):
    G, TEAMS, BN, STAGES, CAP = VARIANTS[name]
    launcher = _launch.setdefault(x.dtype, Launcher(pairs_kernel))
    descriptors = _jagged_rows(x.view(-1, 1, 128), 64, 128), _jagged_rows(y.view(-1, 1, 128), BN, 128)
    grid = min(tiles.shape[0] - 1, multiprocessors(x.device) or 3)
    launcher((grid,), (out, *descriptors, tiles, x_offsets, pair_offsets),
             {"G": G, "TEAMS": TEAMS, "BN": BN, "STAGES": STAGES, "CAP": CAP, "IMAGES": images, "num_warps": 4,
              **overlap_options(launches_overlap(x.device))})
    return launcher


def run(name, x, y, x_offsets, y_offsets, pair_offsets, total, out=None):
    """As ``jagged_products.pair_bmm``; ``out`` begins at a multiple of 16 bytes."""
    out = x.new_empty(total) if out is None else out
    assert x.shape[1] == y.shape[1] == 128 and x.is_contiguous() and y.is_contiguous() and out.data_ptr() % 16 == 0
    if total == 0:
        return out
    rows = 64 * VARIANTS[name][0]
    key = name, x.dtype
    if key not in _images:  # compiled, and run without work, to find where the images lie
        place = 0
        if x.is_cuda:
            nothing = torch.zeros(2, FIELDS.value, dtype=torch.int64, device=x.device)
            while True:
                launcher = _start(name, out, x, y, x_offsets, pair_offsets, nothing, place)
                compiled = list(launcher.compiled.values())[-1][0]
                found = place_of_images(compiled.asm["llir"])
                assert found % 16 == 0
                if found == place: break
                place = found
        _images[key] = place
    tiles = list_tiles(x_offsets, y_offsets, x.shape[0] // rows + x_offsets.numel() - 1, 0, rows)
    _start(name, out, x, y, x_offsets, pair_offsets, tiles, _images[key])
    return out
