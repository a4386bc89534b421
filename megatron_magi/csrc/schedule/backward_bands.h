// Key tiles whose query rows are walked in bands, one band after another.
//
// Processors differ in speed by half a percent. In a long launch, blocks that walk the same rows
// drift apart until what lies between them no longer fits in the cache. Blocks that stay within a
// band of the rows share it wherever they are.
#pragma once

#include <cstdint>

#include "schedule/backward.h"

namespace magi {

// Rows of a band for items of so many rows of one length, or 0 if all rows fit: a row has so many
// bytes of Q, dO and dQ in one head, and the cache holds `shared_bytes` of them.
int64_t rows_of_band(double rows, double row_bytes, double shared_bytes);

// Cuts every item into bands of about so many rows, counted from its first one: the first bands of
// all items in the list's order, then the second ones. A query tile stays whole. The blocks of a
// tile add up what they have made (attention/backward/split_tiles.cuh).
void cut_into_bands(BwdWorkList& list, int64_t band_rows, int64_t tile_q);

}  // namespace magi
