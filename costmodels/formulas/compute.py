"""Seconds of local work: matrix products, attention, and passes over memory.

Matrix products (m x k times k x n, `count` of them in one launch) run in tiles, a wave of tiles
at a time, one tile per multiprocessor:

    seconds = min over tile shapes of waves * 2 * tile_m * tile_n * (k + k_fill) / sm_rate
    waves   = ceil(count * ceil(m / tile_m) * ceil(n / tile_n) / num_sms)

`k_fill` stands for filling and draining a tile's pipeline, in units of k: products with a short
inner dimension lose. Small tiles fill the machine better but reuse less, so they run at a lower
rate. No product is faster than moving its operands, and each kernel leaves a gap.

Attention that keeps its scores on chip counts the FLOPs that its kernel does; short sequences and
narrow heads fill its tiles badly:

    rate = peak * efficiency * length / (length + length_fill) * 1.25 * d / (d + 32)

Everything else moves bytes.

Sources: tile and wave quantisation: NVIDIA, "Matrix Multiplication Background User's Guide"
(DU-10801-001), sections 3 and 4; tile shapes and their relative rates are cuBLAS's habits, chosen
by us. Roofline: Williams, Waterman and Patterson, CACM 52 (2009). Attention: Dao,
arXiv:2307.08691, figures 4-7 (rate by length and head width).
"""

from sympy import Expr, Rational, sympify

from costmodels.formulas.functions import Ceil, Formula, Maximum, maximum, minimum
from costmodels.symbols import Quantity

m = Quantity("m", "1", "rows of the output of a matrix product")
n = Quantity("n", "1", "columns of the output of a matrix product")
k = Quantity("k", "1", "length of the inner dimension")
count = Quantity("count", "1", "products of this shape in one launch")
element_bytes = Quantity("element_bytes", "bytes", "size of an operand's element")
peak = Quantity("peak", "FLOP/s", "dense peak rate in the operands' format")
gemm_efficiency = Quantity("gemm_efficiency", "1", "share of the peak that large products sustain")
k_fill = Quantity("k_fill", "1", "filling and draining of a tile, in units of k")
num_sms = Quantity("num_sms", "1", "multiprocessors")
tail_share = Quantity("tail_share", "1", "share of the last wave's idle time that is lost")
memory_bandwidth = Quantity("memory_bandwidth", "bytes/s", "peak bandwidth of device memory")
memory_efficiency = Quantity("memory_efficiency", "1", "share of it that long passes sustain")
kernel_gap = Quantity("kernel_gap", "s", "device time that each kernel loses at its ends")
kernels = Quantity("kernels", "1", "kernel launches")
attention_flops = Quantity("attention_flops", "FLOP", "work that the attention kernel does")
attention_efficiency = Quantity("attention_efficiency", "1", "share of the peak on long sequences")
length = Quantity("length", "1", "tokens of a sequence that one attention call sees")
length_fill = Quantity("length_fill", "1", "length at which attention runs at half its rate")
head_width = Quantity("head_width", "1", "width of an attention head")
moved = Quantity("moved", "bytes", "bytes read and written")

# Output tile (rows, columns) and its rate relative to the largest one. Kind: chosen; reuse per byte
# of shared memory grows with the tile, NVIDIA DU-10801-001 figure 5.
TILES = (
    (256, 128, Rational(1)),
    (128, 128, Rational(95, 100)),
    (128, 64, Rational(80, 100)),
    (64, 64, Rational(60, 100)),
)


def _tiled_seconds(rows: int, columns: int, relative_rate: Rational) -> Expr:
    """Return the arithmetic time of a product cut into tiles of one shape."""
    full = count * Ceil(m / rows) * Ceil(n / columns) / num_sms
    # Idle multiprocessors of the last wave are not all lost: products split their inner dimension
    # over them, the next kernel starts there, and the power that they leave raises the clock.
    waves = Maximum(full + tail_share * (Ceil(full) - full), 1)
    sm_rate = peak * gemm_efficiency * relative_rate / num_sms
    return waves * 2 * rows * columns * (k + k_fill) / sm_rate


def gemm_math_seconds() -> Expr:
    """Return the arithmetic time with the best tile shape."""
    return minimum(*(_tiled_seconds(*tile) for tile in TILES))


def gemm_memory_seconds() -> Expr:
    """Return the time to read both operands and write the result."""
    elements = count * (m * k + k * n + m * n)
    return elements * element_bytes / (memory_bandwidth * memory_efficiency)


def gemm_seconds() -> Expr:
    """Return the time of a matrix product: the slower of arithmetic and memory, and the gap."""
    return maximum(gemm_math_seconds(), gemm_memory_seconds()) + kernel_gap


def attention_seconds() -> Expr:
    """Return the time of attention in one kernel (FlashAttention and its like)."""
    ramp = length / (length + length_fill)
    width = Rational(5, 4) * head_width / (head_width + 32)
    return attention_flops / (peak * attention_efficiency * ramp * width) + kernels * kernel_gap


def pass_seconds() -> Expr:
    """Return the time of kernels that only move memory."""
    return moved / (memory_bandwidth * memory_efficiency) + kernels * kernel_gap


def overlap_exposed() -> Expr:
    """Return what communication adds beside computation that may hide it.

    exposed = max(communication - hidden_by, 0) + slowdown * min(communication, hidden_by)

    While both run, communication kernels hold multiprocessors and memory bandwidth, so that the
    computation that hides them takes `slowdown` longer.
    """
    hidden = minimum(communication, hidden_by)
    return Maximum(communication - hidden_by, sympify(0)) + slowdown * hidden


communication = Quantity("communication", "s", "communication by itself")
hidden_by = Quantity("hidden_by", "s", "computation that may run beside it")
slowdown = Quantity("slowdown", "1", "share of its time that overlapped computation loses")


def formulas() -> tuple[Formula, ...]:
    """Return the formulas of this module."""
    return (
        Formula(
            name="gemm",
            summary="Seconds of a matrix product, or of several of one shape in one launch.",
            results=(("seconds", gemm_seconds()),),
        ),
        Formula(
            name="attention",
            summary="Seconds of attention in one kernel.",
            results=(("seconds", attention_seconds()),),
        ),
        Formula(
            name="memory_pass",
            summary="Seconds of kernels that only move memory.",
            results=(("seconds", pass_seconds()),),
        ),
        Formula(
            name="overlap",
            summary="Seconds that communication adds beside computation that may hide it.",
            results=(("exposed", overlap_exposed()),),
        ),
    )
