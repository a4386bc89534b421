// The work of each block of a backward, and when it adds to the sums of its tile, once for host and
// device.
//
// A lane is the part of a kv head's query heads that a block has. The first kv heads may be whole,
// one after another. Behind them sections of lanes are outermost, then items in list order, then
// the lanes of the section.
#pragma once
#include "../work_lists.h"

namespace magi {

struct BwdBlockWork {
  int item_number;  // in the list
  int kv_head;
  int split;  // of the kv head's num_splits
  int num_splits;
  int head_begin;  // query heads [head_begin, head_begin + heads)
  int heads;
};

// When one of the parts of a tile adds to the tile's sums. They serve the kv heads of one section
// after another.
struct BwdTurnOfPart {
  int turn = 0, count = 1;  // of the parts of the tile and kv head
  int before = 0;           // turns that the sums have seen before, of other kv heads
  int sums = 0;             // number of the sums
};

// The fields are those of MagiBwdParams.
struct BwdBlocks {
  int32_t num_items;
  int32_t num_splits;
  int32_t lanes_per_section;
  int32_t whole_heads;
  int32_t heads_per_block;  // query heads, but of whole kv heads

  template <bool kMayBeWhole = true>
  MAGI_HOST_DEVICE BwdBlockWork work(int block) const {
    const int whole_blocks = whole_heads * num_items;
    const bool is_whole = kMayBeWhole && block < whole_blocks;
    if (kMayBeWhole && !is_whole) block -= whole_blocks;
    BwdBlockWork w;
    w.num_splits = is_whole ? 1 : num_splits;
    w.heads = is_whole ? heads_per_block * num_splits : heads_per_block;
    const int lanes = is_whole ? 1 : lanes_per_section, place = block / lanes;
    const int section = place / num_items;
    w.item_number = place - section * num_items;
    const int lane = section * lanes + block - place * lanes;
    w.kv_head = lane / w.num_splits;
    w.split = lane - w.kv_head * w.num_splits;
    if (kMayBeWhole && !is_whole) w.kv_head += whole_heads;
    w.head_begin = (w.kv_head * w.num_splits + w.split) * w.heads;
    return w;
  }

  // Parts of a tile take turns as their blocks start.
  MAGI_HOST_DEVICE BwdTurnOfPart turn(const BwdBlockWork& w, const BwdItem& item) const {
    BwdTurnOfPart part;
    part.count = w.num_splits * item.num_bands;
    if (part.count == 1) return part;
    // As many splits of a kv head as a section has come together, then those of the next band.
    const int together = lanes_per_section < num_splits ? lanes_per_section : num_splits;
    const int section = w.split / together;
    part.turn = (section * item.num_bands + item.band) * together + w.split - section * together;
    const int heads = lanes_per_section / together, head = w.kv_head - whole_heads;
    part.before = head / heads * part.count;
    part.sums = item.tile * heads + head % heads;
    return part;
  }
};

}  // namespace magi
