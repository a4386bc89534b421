// Key tiles whose query rows are walked in bands, one band after another.
//
// Processors differ in speed by half a percent. In a long launch, blocks that walk the same rows
// drift apart until what lies between them no longer fits in the cache. Blocks that stay within a
// band of the rows share it wherever they are.
#pragma once

#include <cstdint>

#include "schedule/backward.h"

namespace magi {

// Of Q, dO and dQ that the cache holds, wherever blocks are in them.
constexpr double kBwdSharedBytes = 34e6;

// Over how many bytes the blocks of a launch drift apart, if each processor does so many steps on
// rows of so many bytes of Q, dO and dQ in one head.
double bwd_drift(double steps_of_processor, double row_bytes);

// Rows of a band for items of so many rows of one length, or 0 if all rows fit.
int64_t rows_of_band(double rows, double row_bytes);

// Cuts every item into bands of about so many rows, counted from its first one: the first bands of
// all items in the list's order, then the second ones. A query tile stays whole. The blocks of a
// tile add up what they have made (attention/backward/parts.cuh).
void cut_into_bands(BwdWorkList& list, int64_t band_rows, int64_t tile_q);

}  // namespace magi
