#include "runtime.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <thread>
#include <utility>

Runtime runtime;

// What a launch reads.
struct CUgraphNode_st {
  int kernel, value;
  unsigned shared;
};
struct CUgraph_st {
  std::vector<CUgraphNode_st*> nodes;
};
struct CUgraphExec_st {
  CUgraph_st* graph;  // shares its nodes
  bool is_alive = true;
};

namespace {

std::mutex mutex;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << what << std::endl;
  std::_Exit(3);
}

// Other threads get on with theirs meanwhile.
void take_time(int microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

cudaError_t result_of(const char* name) {
  if (runtime.failing != name) return cudaSuccess;
  return runtime.last_error = cudaErrorMemoryAllocation;
}

// A kernel's function is its number here, and it takes the address of an int.
int number(const void* function) {
  return static_cast<int>(reinterpret_cast<size_t>(function));
}

void set(CUgraphNode_st* node, const cudaKernelNodeParams& params) {
  *node = {number(params.func), *static_cast<int*>(params.kernelParams[0]), params.sharedMemBytes};
}

CUresult current_context(CUcontext* context) {
  *context = runtime.context;
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  require(mode == cudaStreamCaptureModeRelaxed, "a graph is made outside of captures");
  if (const cudaError_t error = result_of(__func__); error != cudaSuccess) return error;
  *graph = new CUgraph_st;
  ++runtime.graphs_made, ++runtime.graphs_alive;
  return cudaSuccess;
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph,
                                   const cudaGraphNode_t* before, size_t num_before,
                                   const cudaKernelNodeParams* params) {
  if (const cudaError_t error = result_of(__func__); error != cudaSuccess) return error;
  require(num_before == (graph->nodes.empty() ? 0 : 1), "every node but the first has one before");
  if (num_before > 0) require(*before == graph->nodes.back(), "kernels run one after the other");
  *node = new CUgraphNode_st{};
  set(*node, *params);
  graph->nodes.push_back(*node);
  return cudaSuccess;
}

cudaError_t cudaGraphKernelNodeSetAttribute(cudaGraphNode_t, cudaKernelNodeAttrID,
                                            const cudaKernelNodeAttrValue* value) {
  runtime.priorities.push_back(value->priority);
  return result_of(__func__);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                          unsigned long long) {
  require(mode == cudaStreamCaptureModeRelaxed, "a graph is made outside of captures");
  if (const cudaError_t error = result_of(__func__); error != cudaSuccess) return error;
  take_time(5000);
  *exec = new CUgraphExec_st{graph};
  ++runtime.execs_alive;
  return cudaSuccess;
}

cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
  require(exec->is_alive, "parameters are set of a graph that exists");
  require(number(params->func) == node->kernel, "a node keeps its kernel");
  set(node, *params);
  take_time(20);
  return result_of(__func__);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (const cudaError_t error = result_of(__func__); error != cudaSuccess) return error;
  Launched launched{stream, {}, {}, {}, true};
  for (const CUgraphNode_st* node : exec->graph->nodes) {
    launched.kernels.push_back(node->kernel);
    launched.values.push_back(node->value);
    launched.shared.push_back(node->shared);
  }
  runtime.at_launch(stream);
  require(exec->is_alive, "a graph exists until it is launched");
  const std::lock_guard<std::mutex> lock(mutex);
  runtime.launches.push_back(launched);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  require(mode == cudaStreamCaptureModeRelaxed, "a graph is destroyed outside of captures");
  require(exec->is_alive, "a graph is destroyed once");
  exec->is_alive = false;
  --runtime.execs_alive;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t) {
  --runtime.graphs_alive;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** args, size_t shared,
                             cudaStream_t stream) {
  if (const cudaError_t error = result_of(__func__); error != cudaSuccess) return error;
  require(runtime.last_error == cudaSuccess, "the error of a graph is not left for others to find");
  runtime.launches.push_back({stream,
                              {number(function)},
                              {*static_cast<int*>(args[0])},
                              {static_cast<unsigned>(shared)},
                              false});
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = runtime.is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return result_of(__func__);
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = runtime.priority;
  return result_of(__func__);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(mode, *other);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  require(std::strcmp(name, "cuCtxGetCurrent") == 0, "one function of the driver is asked for");
  *function = reinterpret_cast<void*>(&current_context);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return std::exchange(runtime.last_error, cudaSuccess);
}
