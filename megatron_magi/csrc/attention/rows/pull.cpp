// Exchanges without SMs: every rank reads its peers' rows with the copy engine, and streams wait
// for flags in symmetric memory.
//
// Exchange n on one rank, where slot n % slots of its symmetric memory holds the rows it sends:
//   current: wait until all peers have taken exchange n - slots; fill the slot
//   beside:  ready(n) to every peer; for each peer: wait for its ready(n), copy its rows;
//            taken(n) to every peer
// A rank writes all its ready(n) before it waits for anyone's, so no ring of waits can form.
#include "../device/driver.h"
#include "../device/export.h"
#include "params.h"

MAGI_EXPORT int magi_gather_rows(const MagiGatherParams* params, char* message, int message_bytes);

namespace magi {
namespace {

using BatchMemOp = CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);

CUstreamBatchMemOpParams write_of(uint32_t* flag, uint32_t number) {
  CUstreamBatchMemOpParams op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = reinterpret_cast<CUdeviceptr>(flag);
  op.writeValue.value = number;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // after all earlier writes of the stream
  return op;
}

CUstreamBatchMemOpParams wait_of(uint32_t* flag, uint32_t number) {
  CUstreamBatchMemOpParams op{};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = reinterpret_cast<CUdeviceptr>(flag);
  op.waitValue.value = number;
  op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;  // of the difference, so numbers may wrap
  return op;
}

constexpr int kMaxOps = 128;  // the driver takes 256 at a time

template <class OpOf>
Status stream_ops(int num_ops, void* stream, const OpOf& op_of) {
  static const BatchMemOp batch = driver_function<BatchMemOp>("cuStreamBatchMemOp");
  if (batch == nullptr)
    return {kUnsupported,
            "the CUDA driver has no cuStreamBatchMemOp; a 12.0 or newer driver is "
            "required"};
  if (num_ops < 0 || num_ops > kMaxOps)
    return {kInvalidArgument, "num_peers must be at most " + std::to_string(kMaxOps) + ", got " +
                                  std::to_string(num_ops)};
  if (num_ops == 0) return {};
  CUstreamBatchMemOpParams ops[kMaxOps];
  for (int i = 0; i < num_ops; ++i) ops[i] = op_of(i);
  const CUresult result = batch(static_cast<CUstream>(stream), num_ops, ops, 0);
  if (result != CUDA_SUCCESS)
    return {kCudaError,
            "cuStreamBatchMemOp: driver error " + std::to_string(static_cast<int>(result))};
  return {};
}

Status claim(const MagiClaimParams& p) {
  if (p.number == 0) return {};
  return stream_ops(p.num_peers, p.stream,
                    [&](int i) { return wait_of(p.flags[i].taken_here, p.number); });
}

// Lets `beside` wait until the slot is filled, and records the event `filled`.
Status follow_filling(const MagiExchangeParams& p) {
  const auto current = static_cast<cudaStream_t>(p.current);
  const auto beside = static_cast<cudaStream_t>(p.beside);
  const auto filled = static_cast<cudaEvent_t>(p.filled);
  MAGI_RETURN_IF_ERROR(cuda_status(cudaEventRecord(filled, current), "exchange"));
  return cuda_status(cudaStreamWaitEvent(beside, filled, 0), "exchange");
}

Status exchange(const MagiExchangeParams& p) {
  const auto beside = static_cast<cudaStream_t>(p.beside);
  MAGI_RETURN_IF_ERROR(follow_filling(p));
  MAGI_RETURN_IF_ERROR(stream_ops(
      p.num_peers, p.beside, [&](int i) { return write_of(p.flags[i].ready_there, p.number); }));
  for (int i = 0; i < p.num_peers; ++i) {
    const MagiPull& pull = p.pulls[i];
    if (pull.bytes == 0) continue;
    MAGI_RETURN_IF_ERROR(
        stream_ops(1, p.beside, [&](int) { return wait_of(p.flags[i].ready_here, p.number); }));
    MAGI_RETURN_IF_ERROR(cuda_status(
        cudaMemcpyAsync(pull.target, pull.source, pull.bytes, cudaMemcpyDeviceToDevice, beside),
        "reading a peer's rows"));
  }
  MAGI_RETURN_IF_ERROR(stream_ops(
      p.num_peers, p.beside, [&](int i) { return write_of(p.flags[i].taken_there, p.number); }));
  return cuda_status(cudaEventRecord(static_cast<cudaEvent_t>(p.arrived), beside), "exchange");
}

}  // namespace
}  // namespace magi

MAGI_EXPORT int magi_claim_slot(const MagiClaimParams* params, char* message, int message_bytes) {
  return magi::report(magi::claim(*params), message, message_bytes);
}

MAGI_EXPORT int magi_send_rows(const MagiSendParams* params, char* message, int message_bytes) {
  const magi::Status claimed = magi::claim(params->claim);
  if (!claimed.ok()) return magi::report(claimed, message, message_bytes);
  const int gathered = magi_gather_rows(&params->gather, message, message_bytes);
  if (gathered != magi::kOk) return gathered;
  return magi::report(magi::exchange(params->exchange), message, message_bytes);
}

MAGI_EXPORT int magi_exchange(const MagiExchangeParams* params, char* message, int message_bytes) {
  return magi::report(magi::exchange(*params), message, message_bytes);
}

MAGI_EXPORT int magi_wait_event(void* stream, void* event) {
  return cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0);
}

// Lets later work on one stream wait for earlier work on another.
MAGI_EXPORT int magi_follow(void* later, void* earlier, void* event) {
  const cudaError_t error =
      cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(earlier));
  return error != cudaSuccess ? error : magi_wait_event(later, event);
}
