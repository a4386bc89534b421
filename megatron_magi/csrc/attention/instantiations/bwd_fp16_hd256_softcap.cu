// Own file: variants compile in parallel.
#include "../backward/run.cuh"

namespace magi {
MAGI_INSTANTIATE_BWD_MAIN(kMagiFp16, 256, 256, true);
}  // namespace magi
