// Which block does what: the item and heads of a block, and the steps in the order all its
// warpgroups agree on.
#pragma once
#include "traits.h"

namespace magi {

template <class Traits>
struct BwdBlock {
  BwdItem item;
  int item_number;  // in the list
  int kv_head;
  int split;
  int head_begin;
  int num_steps;
  bool is_received;  // whether the keys are; own ones otherwise

  MAGI_DEVICE BwdBlock(const BwdArgs& args, int block) {
    // Sections of lanes outermost, then items in list order, then the lanes of the section.
    const int lanes = args.lanes_per_section, place = block / lanes;
    const int unit = args.order == nullptr ? place : args.order[place];
    const int section = unit / args.num_items;
    item_number = unit - section * args.num_items;
    item = args.items[item_number];
    is_received = item.k_start >= args.num_own;
    const int lane = section * lanes + block - place * lanes;
    kv_head = lane / args.num_splits;
    split = lane - kv_head * args.num_splits;
    head_begin = (kv_head * args.num_splits + split) * args.heads_per_block;
    num_steps = item.steps * args.heads_per_block;
  }

  // The first key's row among the own keys, or among the received ones.
  MAGI_DEVICE int first_row(const BwdArgs& args) const {
    return item.k_start - (is_received ? args.num_own : 0);
  }

  // Calls f(n, entry, its number, first query row, head) for every step in order.
  template <class F>
  MAGI_DEVICE void walk(const BwdArgs& args, F&& f) const {
    const int num_entries = item.entry_end - item.entry_begin;
    const int inner_heads = args.heads_inner ? args.heads_per_block : 1;
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
