// Own file: variants compile in parallel.
#include "../backward/run.cuh"

namespace magi {
MAGI_INSTANTIATE_BWD(kMagiFp16, 64, 64);
MAGI_INSTANTIATE_BWD_ROWS(kMagiFp16, 64);
}  // namespace magi
