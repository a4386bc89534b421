// Own file: variants compile in parallel.
#include "../backward/run.cuh"

namespace magi {
MAGI_INSTANTIATE_BWD_MAIN(kMagiBf16, 96, 96, true);
}  // namespace magi
