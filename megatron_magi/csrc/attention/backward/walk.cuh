// Which block does what: the item and heads of a block, and the steps in the order all its
// warpgroups agree on.
#pragma once
#include "traits.h"

namespace magi {

template <class Traits>
struct BwdBlock {
  BwdItem item;
  int kv_head;
  int split;
  int head_begin;
  int num_steps;

  MAGI_DEVICE BwdBlock(const BwdArgs& args, int block) {
    // Sections of kv heads outermost, then items in list order, then the heads of the section.
    const int per_item = args.heads_per_section * args.num_splits;
    const int section = block / (args.num_items * per_item);
    const int rest = block - section * args.num_items * per_item;
    item = args.items[rest / per_item];
    kv_head = section * args.heads_per_section + rest % per_item / args.num_splits;
    split = rest % args.num_splits;
    head_begin = (kv_head * args.num_splits + split) * args.heads_per_block;
    num_steps = item.steps * args.heads_per_block;
  }

  // Calls f(n, entry, its number, first query row, head) for every step in order.
  template <class F>
  MAGI_DEVICE void walk(const BwdArgs& args, F&& f) const {
    const int num_entries = item.entry_end - item.entry_begin;
    const int inner_heads = args.heads_inner ? args.heads_per_block : 1;
    int outer = 0, inner = 0, e = -1, tile = 0, tiles = 0, number = 0;
    BwdEntry entry{};
#pragma unroll 1
    for (int n = 0; n < num_steps; ++n) {
      if (tile == tiles) {  // next entry, perhaps of the next head
        if (++e == num_entries) e = 0, ++outer;
        number = args.descending ? item.entry_end - 1 - e : item.entry_begin + e;
        entry = args.entries[number];
        tiles = (entry.q_end - entry.q_begin + Traits::kTileQ - 1) / Traits::kTileQ;
        tile = 0;
      }
      const int q = entry.q_begin + (args.descending ? tiles - 1 - tile : tile) * Traits::kTileQ;
      f(n, entry, number, q, head_begin + outer + inner);
      if (++inner == inner_heads) inner = 0, ++tile;
    }
  }

  // With the steps that fill the last pair.
  MAGI_DEVICE int num_whole_steps() const {
    return Traits::kInPairs ? (num_steps + 1) / 2 * 2 : num_steps;
  }
};

}  // namespace magi
