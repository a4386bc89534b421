// Own file: variants compile in parallel.
#include "../backward/run.cuh"

namespace magi {
MAGI_INSTANTIATE_BWD(kMagiBf16, 96, 96);
MAGI_INSTANTIATE_BWD_ROWS(kMagiBf16, 96);
}  // namespace magi
