// Own file: variants compile in parallel.
#include "../backward/run.cuh"

namespace magi {
MAGI_INSTANTIATE_BWD(kMagiFp16, 256, 256);
MAGI_INSTANTIATE_BWD_ROWS(kMagiFp16, 256);
}  // namespace magi
