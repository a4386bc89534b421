#include "kernel_chain.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "driver.h"
#include "outside_capture.h"

namespace magi {
namespace {

// Graphs differ in these. One that is still running delays its own next launch, so every stream has
// its own.
struct Key {
  CUcontext context = nullptr;  // of a device
  cudaStream_t stream = nullptr;
  int priority = 0;  // of the stream, whose handle may have been another one's before
  const void* functions[KernelChain::kMost] = {};

  bool operator==(const Key& other) const {
    return context == other.context && stream == other.stream && priority == other.priority &&
           std::equal(functions, functions + KernelChain::kMost, other.functions);
  }
};

struct Graph {
  Key key;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaGraphNode_t nodes[KernelChain::kMost] = {};
};

// A graph that runs is freed when it has ended.
void destroy(const Graph& graph) {
  if (graph.exec != nullptr) cudaGraphExecDestroy(graph.exec);
  if (graph.graph != nullptr) cudaGraphDestroy(graph.graph);
}

cudaKernelNodeParams node_params(const KernelCall& call) {
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(call.function);
  params.gridDim = call.grid;
  params.blockDim = call.block;
  params.sharedMemBytes = call.shared_bytes;
  params.kernelParams = const_cast<void**>(call.args);
  return params;
}

cudaError_t fill(const KernelCall* calls, int num, Graph* made) {
  cudaError_t error = cudaGraphCreate(&made->graph, 0);
  for (int i = 0; i < num && error == cudaSuccess; ++i) {
    const cudaKernelNodeParams params = node_params(calls[i]);
    const cudaGraphNode_t* before = i > 0 ? &made->nodes[i - 1] : nullptr;
    error = cudaGraphAddKernelNode(&made->nodes[i], made->graph, before, i > 0, &params);
    if (error != cudaSuccess || made->key.priority == 0) continue;
    cudaKernelNodeAttrValue value{};
    value.priority = made->key.priority;
    error =
        cudaGraphKernelNodeSetAttribute(made->nodes[i], cudaKernelNodeAttributePriority, &value);
  }
  if (error != cudaSuccess) return error;
  return cudaGraphInstantiateWithFlags(&made->exec, made->graph, 0);
}

cudaError_t key_of(const KernelCall* calls, int num, cudaStream_t stream, Key* key) {
  using GetCurrent = CUresult (*)(CUcontext*);
  static const GetCurrent get_current = driver_function<GetCurrent>("cuCtxGetCurrent");
  if (get_current == nullptr || get_current(&key->context) != CUDA_SUCCESS ||
      key->context == nullptr)  // a thread that has launched nothing yet
    return cudaErrorNotSupported;
  key->stream = stream;
  for (int i = 0; i < num; ++i) key->functions[i] = calls[i].function;
  return cudaStreamGetPriority(stream, &key->priority);
}

// Those that were launched last, the last one at the end.
class Graphs {
 public:
  cudaError_t launch(const Key& key, const KernelCall* calls, int num) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                              [&](const Graph& graph) { return graph.key == key; });
    if (found == kept_.rend()) {
      const cudaError_t error = outside_capture([&] { return add(key, calls, num); });
      if (error != cudaSuccess) return error;
    } else {
      std::rotate(found.base() - 1, found.base(), kept_.end());
    }
    const Graph& graph = kept_.back();
    for (int i = 0; i < num; ++i) {
      const cudaKernelNodeParams params = node_params(calls[i]);
      const cudaError_t error =
          cudaGraphExecKernelNodeSetParams(graph.exec, graph.nodes[i], &params);
      if (error != cudaSuccess) return error;
    }
    return cudaGraphLaunch(graph.exec, key.stream);
  }

 private:
  static constexpr size_t kMost = 64;

  cudaError_t add(const Key& key, const KernelCall* calls, int num) {
    Graph made;
    made.key = key;
    const cudaError_t error = fill(calls, num, &made);
    if (error != cudaSuccess) {
      destroy(made);
      return error;
    }
    if (kept_.size() == kMost) {
      destroy(kept_.front());
      kept_.erase(kept_.begin());
    }
    kept_.push_back(made);
    return cudaSuccess;
  }

  std::mutex mutex_;
  std::vector<Graph> kept_;
};

cudaError_t launch_graph(const KernelCall* calls, int num, cudaStream_t stream) {
  static Graphs* const graphs = new Graphs;  // never destroyed: the driver may have ended before
  Key key;
  const cudaError_t error = key_of(calls, num, stream, &key);
  return error != cudaSuccess ? error : graphs->launch(key, calls, num);
}

cudaError_t launch_each(const KernelCall* calls, int num, cudaStream_t stream) {
  for (int i = 0; i < num; ++i) {
    const KernelCall& call = calls[i];
    const cudaError_t error =
        cudaLaunchKernel(call.function, call.grid, call.block, const_cast<void**>(call.args),
                         call.shared_bytes, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t KernelChain::launch(cudaStream_t stream) const {
  // A captured graph gets the kernels themselves.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const bool asked = cudaStreamIsCapturing(stream, &capture) == cudaSuccess;
  if (num_ > 0 && asked && capture == cudaStreamCaptureStatusNone &&
      launch_graph(calls_, num_, stream) == cudaSuccess)
    return cudaSuccess;
  cudaGetLastError();  // nothing was enqueued; kernels one by one say why, or run
  return launch_each(calls_, num_, stream);
}

}  // namespace magi
