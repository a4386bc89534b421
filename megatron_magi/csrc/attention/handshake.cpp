// ABI version and struct sizes, which the caller compares before its first call, and early loading
// of kernels. The calls themselves are in */launch.*.
#include "backward/params.h"
#include "device/export.h"
#include "device/kernel_list.h"
#include "params.h"
#include "rows/params.h"
#include "sink/params.h"

constexpr int kAbiVersion = 17;

MAGI_EXPORT int magi_abi_version() {
  return kAbiVersion;
}

MAGI_EXPORT int magi_fwd_params_bytes() {
  return sizeof(MagiFwdParams);
}

MAGI_EXPORT int magi_bwd_params_bytes() {
  return sizeof(MagiBwdParams);
}

MAGI_EXPORT int magi_delta_params_bytes() {
  return sizeof(MagiDeltaParams);
}

MAGI_EXPORT int magi_sink_params_bytes() {
  return sizeof(MagiSinkParams);
}

MAGI_EXPORT int magi_row_params_bytes() {
  return sizeof(MagiGatherParams) + sizeof(MagiAddParams);
}

MAGI_EXPORT int magi_exchange_params_bytes() {
  return sizeof(MagiExchangeParams) + sizeof(MagiClaimParams) + sizeof(MagiPeerFlags) +
         sizeof(MagiPull) + sizeof(MagiSendParams);
}

// All kernels of the library, whatever their dtype.
MAGI_EXPORT int magi_num_kernels() {
  return static_cast<int>(magi::all_kernels().size());
}

// Loads what a model of this MagiDtype launches onto the current device; *num_loaded: how many.
MAGI_EXPORT int magi_load_kernels(int32_t dtype, int32_t* num_loaded, char* message,
                                  int message_bytes) {
  return magi::report(magi::load_kernels(dtype, num_loaded), message, message_bytes);
}
