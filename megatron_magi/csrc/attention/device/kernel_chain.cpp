#include "kernel_chain.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
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

cudaKernelNodeParams node_params(const KernelCall& call) {
  cudaKernelNodeParams params{};
  params.func = const_cast<void*>(call.function);
  params.gridDim = call.grid;
  params.blockDim = call.block;
  params.sharedMemBytes = call.shared_bytes;
  params.kernelParams = const_cast<void**>(call.args);
  return params;
}

class Graph {
 public:
  const Key key;

  explicit Graph(const Key& of) : key(of) {}
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // One that runs is freed when it has ended.
  ~Graph() {
    outside_capture([&] {
      if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
      return graph_ != nullptr ? cudaGraphDestroy(graph_) : cudaSuccess;
    });
  }

  cudaError_t make(const KernelCall* calls, int num) {
    return outside_capture([&] { return fill(calls, num); });
  }

  // Threads may do so at the same time, one after the other.
  cudaError_t launch(const KernelCall* calls, int num) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int i = 0; i < num; ++i) {
      const cudaKernelNodeParams params = node_params(calls[i]);
      const cudaError_t error = cudaGraphExecKernelNodeSetParams(exec_, nodes_[i], &params);
      if (error != cudaSuccess) return error;
    }
    return cudaGraphLaunch(exec_, key.stream);
  }

 private:
  cudaError_t fill(const KernelCall* calls, int num) {
    cudaError_t error = cudaGraphCreate(&graph_, 0);
    for (int i = 0; i < num && error == cudaSuccess; ++i) {
      const cudaKernelNodeParams params = node_params(calls[i]);
      const cudaGraphNode_t* before = i > 0 ? &nodes_[i - 1] : nullptr;
      error = cudaGraphAddKernelNode(&nodes_[i], graph_, before, i > 0, &params);
      if (error != cudaSuccess || key.priority == 0) continue;
      cudaKernelNodeAttrValue value{};
      value.priority = key.priority;
      error = cudaGraphKernelNodeSetAttribute(nodes_[i], cudaKernelNodeAttributePriority, &value);
    }
    return error != cudaSuccess ? error : cudaGraphInstantiateWithFlags(&exec_, graph_, 0);
  }

  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  cudaGraphNode_t nodes_[KernelChain::kMost] = {};
  std::mutex mutex_;
};

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
  // A launch waits where its stream is a thousand launches behind, so it holds up those of the same
  // graph alone: another stream's may be what its stream waits for.
  cudaError_t launch(const Key& key, const KernelCall* calls, int num) {
    std::shared_ptr<Graph> graph;
    const cudaError_t error = get(key, calls, num, &graph);
    return error != cudaSuccess ? error : graph->launch(calls, num);
  }

 private:
  static constexpr size_t kMost = 64;

  cudaError_t get(const Key& key, const KernelCall* calls, int num, std::shared_ptr<Graph>* graph) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                              [&](const auto& kept) { return kept->key == key; });
    if (found == kept_.rend()) {
      const cudaError_t error = add(key, calls, num);
      if (error != cudaSuccess) return error;
    } else {
      std::rotate(found.base() - 1, found.base(), kept_.end());
    }
    *graph = kept_.back();
    return cudaSuccess;
  }

  cudaError_t add(const Key& key, const KernelCall* calls, int num) {
    auto made = std::make_shared<Graph>(key);
    const cudaError_t error = made->make(calls, num);
    if (error != cudaSuccess) return error;
    if (kept_.size() == kMost) kept_.erase(kept_.begin());
    kept_.push_back(std::move(made));
    return cudaSuccess;
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<Graph>> kept_;
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
