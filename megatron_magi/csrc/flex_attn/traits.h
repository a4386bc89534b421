// Constants, work-list records and shared-memory plans of the kernels.
#pragma once
#include <cstdint>

#include "common/mask.h"

namespace magi {

// ---- work-list records, written by csrc/solver/work_list_fwd.cpp as int32 rows

// One query tile: tokens [q_start, q_start + num_tokens), keys of `num_entries` entries.
struct FwdTile {
  int32_t q_start, num_tokens, entry_begin, num_entries;
  int32_t num_steps;  // sum of the entries' num_tiles, at least 1
  int32_t unused[3];
};
static_assert(sizeof(FwdTile) == 32, "the solver writes rows of 8 int32");

// The key tiles of one slice for one query tile: tile j covers keys
// [k_begin + j * block_n, ... + block_n); tiles in [full_begin, full_end) need no mask.
struct FwdEntry {
  int32_t k_begin, num_tiles, full_begin, full_end;
  Band band;
  int32_t unused[2];
};
static_assert(sizeof(FwdEntry) == 48, "the solver writes rows of 12 int32");

// ---- forward

// kCluster 2: two blocks work on two units (heads) of one kv head side by side; each loads half of
// every K and V tile into both, which halves the traffic from L2.
template <class Element_, int kHeadDim_, int kBlockN_, int kCluster_>
struct FwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = 128;  // rows of a tile: two consumer warpgroups of 64
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kConsumers = 2;
  static constexpr int kCluster = kCluster_;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegs = 40;
  static constexpr int kConsumerRegs = 232;
  static constexpr int kPanels = kHeadDim / 64;
  static constexpr int kStages = 2;                      // of K and of V
  // With wide key tiles at head_dim 128 there is room for one Q tile only and none for the output,
  // which then leaves straight from registers: such tiles are for long walks.
  static constexpr bool kRoomy = kHeadDim * kBlockN <= 128 * 128;
  static constexpr int kQStages = kRoomy ? 2 : 1;
  static constexpr bool kStageOut = kRoomy;              // output tile has its own shared memory
  static constexpr int kRecordSlots = 2 * kStages;       // see fwd_kernel.cuh, "step record"
  static constexpr int kInfoSlots = kQStages + 2;        // see fwd_kernel.cuh, "item record"

  static constexpr int kItemSlots = 4;                   // see FwdProducer::run

  static constexpr int kQBytes = 64 * kHeadDim * 2;      // one consumer's rows
  static constexpr int kKVBytes = kBlockN * kHeadDim * 2;
  static constexpr int kQPanelBytes = 64 * 128;
  static constexpr int kKVPanelBytes = kBlockN * 128;

  struct SharedStorage {
    alignas(1024) uint8_t q[kQStages][kConsumers][kQBytes];
    alignas(1024) uint8_t k[kStages][kKVBytes];
    alignas(1024) uint8_t v[kStages][kKVBytes];
    alignas(1024) uint8_t out[kStageOut ? kConsumers * kQBytes : 16];
    int4 records[kRecordSlots][2];
    int4 infos[kInfoSlots];
    int32_t items[kItemSlots];  // cluster: item numbers from the leading block
    uint64_t full_item[kItemSlots];
    uint64_t empty_q[kQStages];
    uint64_t full_k[kStages], empty_k[kStages];
    uint64_t full_v[kStages], empty_v[kStages];
  };
  static constexpr int kSharedBytes = sizeof(SharedStorage);

  static_assert(kCluster == 1 || (kCluster == 2 && kPanels == 2),
                "a pair of blocks shares a tile panel by panel");
  static_assert(kHeadDim % 64 == 0, "a swizzled panel is 64 columns wide");
  static_assert(kKVPanelBytes % 1024 == 0, "panels start on a swizzle atom");
  static_assert(kBlockN % 16 == 0, "P V steps take 16 keys");
  static_assert(128 * kProducerRegs + 256 * kConsumerRegs <= 168 * kThreads,
                "setmaxnreg may only hand out the registers the launch took");
  static_assert(kSharedBytes <= 227 * 1024, "a Hopper block has 227 KB of shared memory");
};

}  // namespace magi
