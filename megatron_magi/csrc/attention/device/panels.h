// How the columns of a 16-bit tile lie in shared memory.
#pragma once

namespace magi {

// Columns of a panel. Panels lie one behind the other, and a row of a panel is as long as the
// swizzle: 128 bytes, or 64 where a head is not a multiple of 64 columns wide.
constexpr int panel_cols(int width) {
  return width % 64 == 0 ? 64 : 32;
}

}  // namespace magi
