// Where a consumer thread stands: its two rows of the tile, and how it shares with its warp.
#pragma once
#include "../device/lanes.h"
#include "args.cuh"

namespace magi {

template <class Traits>
struct FwdRows {
  using Storage = typename Traits::SharedStorage;
  const FwdKernelParams& p;
  Storage& smem;
  const int consumer;
  const int thread;  // 0..127 in the warpgroup
  const int lane;
  const int row;  // first of this thread's two rows (row, row + 8) in the tile

  MAGI_DEVICE FwdRows(const FwdKernelParams& params, Storage& storage, int consumer_idx)
      : p(params),
        smem(storage),
        consumer(consumer_idx),
        thread(threadIdx.x & 127),
        lane(threadIdx.x & 31),
        row(consumer_idx * 64 + (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4) {}

  // Lane 0 arrives for its warp, and alone reads what the producer writes.
  MAGI_DEVICE void release(uint64_t* empty) const {
    if (lane == 0) mbar_arrive(smem_addr(empty));
  }
  // Consumers issue their products one after another, in turn.
  MAGI_DEVICE void wait_turn() const { bar_sync(1 + Traits::kConsumers + consumer, 256); }
  MAGI_DEVICE void pass_turn() const {
    const int next = Traits::kConsumers == 2 ? consumer ^ 1 : (consumer + 1) % Traits::kConsumers;
    bar_arrive(1 + Traits::kConsumers + next, 256);
  }
  MAGI_DEVICE int shared_by_lane0(const int& source) const {
    return from_lane0(lane == 0 ? source : 0);
  }
  MAGI_DEVICE int4 shared_by_lane0(const int4& source) const {
    return from_lane0(lane == 0 ? source : make_int4(0, 0, 0, 0));
  }

  MAGI_DEVICE FwdItem shared_by_lane0(const FwdItem& source) const {
    const int4 x = shared_by_lane0(reinterpret_cast<const int4&>(source));
    return {x.x, x.y, x.z, x.w};
  }

  MAGI_DEVICE Band shared_by_lane0(const FwdStep& source) const {
    const int4 rows = shared_by_lane0(source.rows), keys = shared_by_lane0(source.keys);
    return FwdStep::band(rows, keys);
  }

  struct RowAddress {
    int64_t token, head;
    bool valid;
  };
  MAGI_DEVICE RowAddress address_of(int tile_row, FwdItem item) const {
    const int token = tile_row >> p.pack_shift;
    const int head_in_group = tile_row & ((1 << p.pack_shift) - 1);
    return {static_cast<int64_t>(item.out_start) + token,
            (item.unit << p.pack_shift) + head_in_group, token < item.num_tokens};
  }
};

}  // namespace magi
