"""The public names of ``megatron_magi``, which imports them from here."""

# ruff: noqa: F401
# mypy: implicit-reexport

from megatron_magi import masks
from megatron_magi.config import CostTable, MagiConfig
from megatron_magi.core.kernel.attention import AttnForwardMeta, flex_flash_attn_func
from megatron_magi.core.kernel.head_groups import flex_flash_attn_by_head_group
from megatron_magi.core.kernel.slice_table import slices_tensor
from megatron_magi.core.kernel.softmax import Softmax
from megatron_magi.core.mask import AttnMask, AttnSlice, PrefixTree, SliceType
from megatron_magi.core.plan import AttnPlan, HeadShape, TokenLayout
from megatron_magi.core.runtime.agreement.comparison import AgreementError, agree
from megatron_magi.core.runtime.dist_attn import dist_attn
from megatron_magi.core.runtime.plan_cache import plan_for as plan
from megatron_magi.core.runtime.prepared import prepare
from megatron_magi.core.runtime.shift import shift_tokens
from megatron_magi.core.runtime.token_dispatch import dispatch, position_ids, undispatch
from megatron_magi.core.runtime.tree_edges import TreeEdges, sum_by_branch, tree_edges
