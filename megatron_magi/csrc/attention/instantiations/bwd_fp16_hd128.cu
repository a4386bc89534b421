// Own file: variants compile in parallel.
#include "../backward/run.cuh"

namespace magi {
MAGI_INSTANTIATE_BWD(kMagiFp16, 128, 128);
MAGI_INSTANTIATE_BWD_ROWS(kMagiFp16, 128);
}  // namespace magi
