// The widths of heads that kernels are compiled for: the one list, for kernels, planner and Python.
#pragma once
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

namespace magi {

struct HeadWidths {
  int32_t head_dim;   // of queries and keys
  int32_t value_dim;  // of values and outputs; another one in multi-latent attention
};

// Cheapest first: a call takes the first ones that hold its heads.
inline constexpr HeadWidths kCompiledWidths[] = {
    {64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};

// For errors, e.g. "64, 128 and 192 with value_dim 128".
inline std::string compiled_widths_text() {
  std::string text;
  size_t left = std::size(kCompiledWidths);
  for (const auto& [head_dim, value_dim] : kCompiledWidths) {
    text += std::to_string(head_dim);
    if (value_dim != head_dim) text += " with value_dim " + std::to_string(value_dim);
    --left;
    text += left > 1 ? ", " : left == 1 ? " and " : "";
  }
  return text;
}

}  // namespace magi
