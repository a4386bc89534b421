// A block's item and heads (blocks.h), and its steps in the order all its warpgroups agree on.
#pragma once
#include "traits.h"

namespace magi {

template <class Traits>
struct BwdBlock : BwdBlockWork {
  BwdItem item;
  int num_steps;

  MAGI_DEVICE BwdBlock(const BwdArgs& args, int block)
      : BwdBlockWork(args.blocks.work<!Traits::kDeterministic>(block)),
        item(args.items[item_number]),
        num_steps(item.steps * heads) {}

  // Calls f(n, entry, its number, first query row, head) for every step in order.
  template <class F>
  MAGI_DEVICE void walk(const BwdArgs& args, F&& f) const {
    const int num_entries = item.entry_end - item.entry_begin;
    const int inner_heads = args.heads_inner ? heads : 1;
    int outer = 0, inner = 0, e = -1, tile = 0, tiles = 0, entry_number = 0;
    BwdEntry entry{};
#pragma unroll 1
    for (int n = 0; n < num_steps; ++n) {
      if (tile == tiles) {  // next entry, perhaps of the next head
        if (++e == num_entries) e = 0, ++outer;
        entry_number = args.descending ? item.entry_end - 1 - e : item.entry_begin + e;
        entry = args.entries[entry_number];
        tiles = (entry.q_end - entry.q_begin + Traits::kTileQ - 1) / Traits::kTileQ;
        tile = 0;
      }
      const int q = entry.q_begin + (args.descending ? tiles - 1 - tile : tile) * Traits::kTileQ;
      f(n, entry, entry_number, q, head_begin + outer + inner);
      if (++inner == inner_heads) inner = 0, ++tile;
    }
  }

  // With the steps that fill the last pair.
  MAGI_DEVICE int num_whole_steps() const {
    return Traits::kInPairs ? (num_steps + 1) / 2 * 2 : num_steps;
  }
};

}  // namespace magi
