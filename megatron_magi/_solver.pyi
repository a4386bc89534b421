"""The C++ planner (csrc/planner) and the kernels' work lists (csrc/schedule).

Compiled from csrc/bindings*.cpp.

Arrays are int32 and contiguous, slices [N, 6], ranges [n, 2], transfers [M, 5] (stage, dst, src,
start, end). An int64 array is a TypeError, what does not fit together a ValueError. Functions that
take long release the GIL.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

_Int32Array = npt.NDArray[np.int32]
_Int64Array = npt.NDArray[np.int64]
_Float64Array = npt.NDArray[np.float64]
_CastTable = tuple[_Int32Array, tuple[int, ...], tuple[int, ...], _Int32Array]

def canonical_slices(slices: _Int32Array) -> _Int32Array: ...
def slice_areas(slices: _Int32Array) -> _Int64Array: ...
def cut_slices(
    slices: _Int32Array, q_start: int, q_end: int, k_start: int, k_end: int
) -> _Int32Array: ...
def find_overlap(slices: _Int32Array) -> tuple[int, int] | None: ...
def solve_dispatch(
    masks: Sequence[tuple[_Int32Array, int]],
    num_local_tokens: int,
    cp_size: int,
    chunk_size: int,
    tile_q: int,
    tile_k: int,
    max_imbalance_ppm: int,
    swap_trials: int,
    ranks_per_node: int = 0,
) -> tuple[int, _Int32Array]: ...
def dispatch_by_load(
    slices: _Int32Array,
    chunk_size: int,
    num_chunks: int,
    cp_size: int,
    tile_q: int,
    tile_k: int,
) -> _Int32Array: ...
def buffer_slices(
    slices: _Int32Array, query_ranges: _Int32Array, key_ranges: _Int32Array
) -> _Int32Array: ...
def crossing_leg(transfers: _Int32Array, ranks_per_node: int) -> _Int32Array: ...
def hash64(data: bytes, seed: int = 0) -> int: ...
def prepared_call(
    name: str,
    function: int,
    params: bytes,
    fields: Sequence[tuple[int, str]],
    error: type[Exception],
) -> Callable[..., None]:
    """What calls the C function at this address with a struct; see csrc/bindings_call.cpp.

    Args:
        name: of the function, for the error.
        function: int (const void* params, char* message, int message_bytes), which returns 0 or a
            code.
        params: the bytes of the struct.
        fields: offset and kind (P, l, q, Q, i, I or f of the module struct) of those that differ;
            the result takes their values.
        error: raised by the result for other codes than 0.
    """

class StageCosts:
    """What stages take, in picoseconds."""

    def __init__(
        self,
        *,
        row_ps: int,
        grad_row_ps: int,
        tile_ps: int,
        exchange_ps: int,
        call_ps: int,
        pass_ps: int,
        crossing_row_ps: int = 0,
        keeps_rows: bool = False,
    ) -> None: ...
    @property
    def row_ps(self) -> int: ...
    @property
    def grad_row_ps(self) -> int: ...
    @property
    def tile_ps(self) -> int: ...
    @property
    def exchange_ps(self) -> int: ...
    @property
    def call_ps(self) -> int: ...
    @property
    def pass_ps(self) -> int: ...
    @property
    def crossing_row_ps(self) -> int: ...
    @property
    def keeps_rows(self) -> bool: ...
    def forward_stages(self, work: _Int64Array, degree: int, forward: int) -> _Float64Array: ...
    def backward_times(self, work: _Int64Array, degree: int) -> _Float64Array: ...

class Layout:
    """Who owns which rows; checked when it is made."""

    def __init__(
        self, total_seqlen: int, chunk_size: int, cp_size: int, chunk_ranks: _Int32Array
    ) -> None: ...
    def solve_transfers(
        self,
        slices: _Int32Array,
        tile_q: int,
        tile_k: int,
        degree: int,
        forward: int,
        costs: StageCosts,
        ranks_per_node: int = 0,
        keys: Layout | None = None,
        by_queries: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[int, int, _Int32Array, _Int64Array]: ...
    def pair_areas(self, slices: _Int32Array, keys: Layout | None = None) -> _Int64Array: ...
    def rows_on_link(
        self, transfers: _Int32Array, costs: StageCosts, ranks_per_node: int = 0
    ) -> _Int64Array: ...
    def rank_work(
        self,
        slices: _Int32Array,
        loads: _Int64Array,
        link_rows: _Int64Array,
        keys: Layout | None = None,
    ) -> _Int64Array: ...
    def rows_to_travel(self, slices: _Int32Array) -> int: ...
    def shift_transfers(self, shift: int) -> _Int32Array: ...
    def local_ranges(self, rank: int) -> _Int32Array: ...
    def cast_table(self, transfers: _Int32Array, rank: int) -> _CastTable: ...
    def node_cast_table(
        self, transfers: _Int32Array, ranks_per_node: int, rank: int
    ) -> tuple[_CastTable, _CastTable]: ...
    def stage_slices(
        self,
        slices: _Int32Array,
        rank: int,
        key_ranges: _Int32Array,
        query_ranges: _Int32Array | None = None,
    ) -> _Int32Array: ...
    def split_rows(
        self, slices: _Int32Array, rank: int, keys: Layout | None = None
    ) -> tuple[_Int32Array, _Int32Array]: ...

class FwdWorkList:
    """The forward's records, as csrc/schedule/forward.h has them, and their counts."""

    @property
    def tiles(self) -> _Int32Array: ...
    @property
    def entries(self) -> _Int32Array: ...
    @property
    def empty_rows(self) -> _Int32Array: ...
    @property
    def steps(self) -> int: ...
    @property
    def masked_steps(self) -> int: ...
    @property
    def active_keys(self) -> int: ...
    @property
    def num_parts(self) -> int: ...

class BwdWorkList:
    """The backward's records, as csrc/schedule/backward.h has them, and its schedule."""

    @property
    def items(self) -> _Int32Array: ...
    @property
    def entries(self) -> _Int32Array: ...
    @property
    def segments(self) -> _Int32Array: ...
    @property
    def places(self) -> _Int32Array: ...
    @property
    def turns(self) -> _Int32Array: ...
    def visits(self) -> _Int32Array:
        """What every step waits for and signals, by item and walk (deterministic mode)."""
    def in_bands(self, rows: int, tile_q: int = 64) -> BwdWorkList:
        """The list with its items cut into bands of rows."""
    def blocks(self, heads_q: int, heads_kv: int, schedule: tuple[int, int, int]) -> _Int32Array:
        """Every block of a launch in this schedule (splits, lanes of a section, whole heads) whose
        parts take turns: item, kv head, first query head, query heads, number of its sums, turn,
        turns of the tile, turns before those."""
    @property
    def num_tiles(self) -> int: ...
    @property
    def num_row_groups(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def partial_steps(self) -> int: ...
    @property
    def num_splits(self) -> int: ...
    @property
    def lanes_per_section(self) -> int: ...
    @property
    def in_turns(self) -> bool: ...
    @property
    def whole_heads(self) -> int: ...
    @property
    def band_rows(self) -> int: ...
    @property
    def descending(self) -> bool: ...
    @property
    def heads_inner(self) -> bool: ...
    @property
    def grouped(self) -> bool: ...

class BwdAlternatives:
    """The schedules that a backward of this mask is chosen from."""

    def __init__(
        self,
        slices: _Int32Array,
        lengths: tuple[int, int],
        heads: tuple[int, int, int],
        num_sms: int,
        deterministic: bool,
        may_take_turns: bool,
    ) -> None:
        """``lengths`` are of queries and keys, ``heads`` query heads, key heads and head_dim."""
    def timed(
        self, costs: dict[str, float]
    ) -> tuple[float, list[tuple[int, int, bool, int, int, float]]]:
        """The tolerance of the choice, and in the order of preference the splits, lanes of a
        section, turns, whole heads, rows of a band and time in steps of every schedule, if these
        costs (others: the present ones) were true."""

def bwd_costs() -> dict[str, float]:
    """The present costs; see csrc/schedule/backward_costs.h."""

class FwdChoice:
    """A forward that may run: its kernel and its work list."""

    @property
    def pack(self) -> int: ...
    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def heads_per_section(self) -> int: ...
    @property
    def cost(self) -> float: ...
    @property
    def work(self) -> FwdWorkList: ...

class FwdAlternatives:
    """What a forward of this mask is chosen from."""

    def __init__(
        self,
        slices: _Int32Array,
        lengths: tuple[int, int],
        heads: tuple[int, int, int],
        num_sms: int,
    ) -> None:
        """``lengths`` are of queries and keys, ``heads`` query heads, key heads and head_dim."""
    def choices(self, costs: dict[str, float]) -> list[FwdChoice]:
        """In the order of preference, if these costs (others: the present ones) were true; the
        first one of the least cost runs. The lists are cut by the present costs."""

def fwd_costs() -> dict[str, float]:
    """The present costs; see csrc/schedule/forward_costs.h."""

def choose_fwd(
    slices: _Int32Array,
    num_q: int,
    num_k: int,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    num_sms: int,
) -> FwdChoice: ...
def compiled_widths() -> list[tuple[int, int]]: ...
def bwd_tile_k(head_dim: int) -> int: ...
def fwd_variants(heads_q: int, heads_kv: int, head_dim: int) -> list[tuple[int, int, int]]: ...
def fwd_work_list(
    slices: _Int32Array,
    num_q: int,
    num_k: int,
    tile_q: int = 128,
    tile_k: int = 128,
    max_steps: int = 0,
) -> FwdWorkList: ...
def choose_bwd(
    slices: _Int32Array,
    num_q: int,
    num_k: int,
    heads_q: int = 1,
    heads_kv: int = 1,
    head_dim: int = 128,
    num_sms: int = 132,
    tile_q: int = 64,
    tile_k: int | None = None,
    deterministic: bool = False,
    may_take_turns: bool = True,
) -> BwdWorkList: ...
