// Own file: variants compile in parallel.
#include "../backward/run.cuh"

namespace magi {
MAGI_INSTANTIATE_BWD(kMagiFp16, 96, 96);
MAGI_INSTANTIATE_BWD_ROWS(kMagiFp16, 96);
}  // namespace magi
