// Rows between ranks, as they cross the C ABI; mirrored by ctypes in core/cuda/abi.py.
// Conventions are those of ../params.h, but strides are between rows.
#pragma once
#include "../params.h"

constexpr int kMagiMaxRowParts = 2;  // keys and values

struct MagiRows {
  void* data;      // 16-byte aligned
  int64_t stride;  // bytes, multiple of 16
};

// dst[part][i] = src[part][index[i]].
struct MagiGatherParams {
  MagiRows src[kMagiMaxRowParts];
  MagiRows dst[kMagiMaxRowParts];
  const int32_t* index;  // [num_rows]; null: row i
  void* stream;          // host: cudaStream_t
  int64_t num_rows;
  int32_t row_bytes;  // of every part, multiple of 16
  int32_t num_parts;
};

// dst[part][i] = own[part][i] + sum of received[part][sources[j]], j from begin[i] to begin[i + 1],
// added in fp32 in this order. dst may be own: then rows without sources are left alone.
struct MagiAddParams {
  MagiRows own[kMagiMaxRowParts];       // fp32
  MagiRows received[kMagiMaxRowParts];  // received_dtype
  MagiRows dst[kMagiMaxRowParts];       // dst_dtype
  const int32_t* begin;                 // [num_rows + 1]
  const int32_t* sources;               // [begin[num_rows]]
  void* stream;                         // host: cudaStream_t
  int64_t num_rows;
  int32_t width;  // elements of every part's row, multiple of 8
  int32_t num_parts;
  int32_t received_dtype, dst_dtype;  // MagiDtype
};

// Flags of an exchange between ranks, in symmetric memory: numbers that only grow.
// "There" is in a peer's memory, "here" in this rank's.
struct MagiPeerFlags {
  uint32_t* ready_there;  // this rank's rows of exchange n lie in its slot
  uint32_t* ready_here;   // the peer's do
  uint32_t* taken_there;  // this rank has read the peer's rows of exchange n
  uint32_t* taken_here;   // the peer has read this rank's
};

// Rows that this rank reads from one peer.
struct MagiPull {
  const void* source;  // in the peer's slot
  void* target;
  int64_t bytes;
};

// One exchange: this rank's slot is filled by work on `current`, and its peers' rows are read on
// `beside` by the copy engine, peers in the order given.
struct MagiExchangeParams {
  const MagiPeerFlags* flags;  // host: [num_peers]
  const MagiPull* pulls;       // host: [num_peers]
  void* current;               // host: cudaStream_t
  void* beside;                // host: cudaStream_t
  void* filled;                // host: cudaEvent_t
  void* arrived;               // host: cudaEvent_t, recorded when all rows are here
  uint32_t number;             // of the exchange
  int32_t num_peers;
};

// Lets a stream wait until all peers have read this rank's rows of an exchange.
struct MagiClaimParams {
  const MagiPeerFlags* flags;  // host: [num_peers]
  void* stream;                // host: cudaStream_t
  uint32_t number;
  int32_t num_peers;
};

// Claims a slot, gathers rows into it, and begins the exchange that sends them.
struct MagiSendParams {
  MagiClaimParams claim;  // of exchange 0: none, the slot is free
  MagiGatherParams gather;
  MagiExchangeParams exchange;
};
