// A runtime without a GPU: it keeps what it is asked, and fails where a test wants it to.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "cuda_runtime.h"

// Of a graph, or of a kernel that was launched alone.
struct Launched {
  cudaStream_t stream;
  std::vector<int> kernels;  // the numbers of their functions
  std::vector<int> values;   // what their first argument held
  std::vector<unsigned> shared;
  bool in_graph;
};

struct Runtime {
  std::vector<Launched> launches;
  int graphs_made = 0, graphs_alive = 0, execs_alive = 0;
  std::vector<int> priorities;  // of the nodes whose priority was set
  std::string failing;          // the function that fails
  CUcontext context = reinterpret_cast<CUcontext>(1);
  int priority = 0;  // of every stream
  bool is_capturing = false;
  cudaError_t last_error = cudaSuccess;
  std::function<void(cudaStream_t)> at_launch = [](cudaStream_t) {};
};

extern Runtime runtime;
