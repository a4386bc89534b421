// What launches of kernel chains do, each scenario in a process of its own.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "../../../../megatron_magi/csrc/attention/device/kernel_chain.h"
#include "runtime.h"

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::cerr << what << std::endl;
  std::_Exit(1);
}
#define CHECK(holds) check(holds, #holds)

cudaStream_t stream(size_t number) {
  return reinterpret_cast<cudaStream_t>(number);
}

// Kernels of these numbers, each with the value as its argument.
cudaError_t launch(std::vector<size_t> kernels, int value, size_t on) {
  magi::KernelChain chain;
  for (const size_t kernel : kernels)
    chain.add({reinterpret_cast<const void*>(kernel),
               dim3(2),
               dim3(32),
               static_cast<unsigned>(10 * kernel),
               {&value, nullptr}});
  return chain.launch(stream(on));
}

const Launched& last() {
  return runtime.launches.back();
}

void one_graph_for_each_stream_and_choice() {
  for (int value = 0; value < 3; ++value)
    for (const size_t on : {7, 8})
      for (const std::vector<size_t>& kernels :
           {std::vector<size_t>{1}, {1, 2}, {2, 1}, {1, 2, 3}, {1, 2, 4}}) {
        CHECK(launch(kernels, value, on) == cudaSuccess);
        CHECK(last().in_graph && last().stream == stream(on));
        CHECK(last().kernels == std::vector<int>(kernels.begin(), kernels.end()));
        CHECK(last().values == std::vector<int>(kernels.size(), value));
        for (size_t i = 0; i < kernels.size(); ++i) CHECK(last().shared[i] == 10 * kernels[i]);
      }
  CHECK(runtime.launches.size() == 30 && runtime.graphs_made == 10);
  runtime.context = reinterpret_cast<CUcontext>(2);
  CHECK(launch({1}, 5, 7) == cudaSuccess && runtime.graphs_made == 11);
  CHECK(runtime.priorities.empty());
  runtime.priority = -3;  // another stream with the handle of one that has ended
  CHECK(launch({1}, 5, 7) == cudaSuccess && runtime.graphs_made == 12);
  CHECK(runtime.priorities == std::vector<int>{-3});
}

void those_that_were_launched_last_are_kept() {
  for (size_t on = 1; on <= 64; ++on) CHECK(launch({1}, 0, on) == cudaSuccess);
  CHECK(launch({1}, 0, 1) == cudaSuccess && runtime.graphs_made == 64);
  CHECK(launch({1}, 0, 65) == cudaSuccess && runtime.graphs_made == 65);  // in the place of 2
  CHECK(runtime.graphs_alive == 64 && runtime.execs_alive == 64);
  for (const size_t on : {1, 3, 64, 65}) CHECK(launch({1}, 0, on) == cudaSuccess);
  CHECK(runtime.graphs_made == 65);
  CHECK(launch({1}, 0, 2) == cudaSuccess && runtime.graphs_made == 66);
}

// The kernels run one by one, or say why not.
void without_a_graph() {
  const size_t made = runtime.launches.size();
  CHECK(launch({1, 2, 3}, 9, 7) == cudaSuccess && runtime.launches.size() == made + 3);
  for (size_t i = 0; i < 3; ++i) {
    const Launched& one = runtime.launches[made + i];
    CHECK(!one.in_graph && one.stream == stream(7) && one.values == std::vector<int>{9});
    CHECK(one.kernels == std::vector<int>{static_cast<int>(i + 1)} && one.shared[0] == 10 * i + 10);
  }
}

void captures_get_the_kernels() {
  runtime.is_capturing = true;
  without_a_graph();
  CHECK(runtime.graphs_made == 0);
}

void failing_graphs_are_left_out() {
  runtime.priority = -1;
  for (const char* function :
       {"cudaGraphCreate", "cudaGraphAddKernelNode", "cudaGraphKernelNodeSetAttribute",
        "cudaGraphInstantiateWithFlags", "cudaStreamIsCapturing", "cudaStreamGetPriority"}) {
    runtime.failing = function;
    without_a_graph();
    CHECK(runtime.graphs_alive == 0 && runtime.execs_alive == 0);
  }
  runtime.failing.clear();
  CHECK(launch({1, 2, 3}, 0, 7) == cudaSuccess && last().in_graph);
  for (const char* function : {"cudaGraphExecKernelNodeSetParams", "cudaGraphLaunch"}) {
    runtime.failing = function;
    without_a_graph();
  }
}

void threads_without_a_context_launch_kernels() {
  runtime.context = nullptr;
  without_a_graph();
  CHECK(runtime.graphs_made == 0);
}

void a_kernel_that_fails_is_an_error() {
  runtime.is_capturing = true;
  runtime.failing = "cudaLaunchKernel";
  CHECK(launch({1, 2}, 0, 7) == cudaErrorMemoryAllocation && runtime.launches.empty());
}

// Runs `work` in a thread whose launch on stream 7 waits until `work` has ended here.
void while_stream_7_waits(const std::function<void()>& work) {
  std::atomic<bool> waits = false, goes_on = false;
  runtime.at_launch = [&](cudaStream_t on) {
    if (on != stream(7)) return;
    waits = true;
    while (!goes_on) std::this_thread::yield();
  };
  std::thread other([] { CHECK(launch({1}, 1, 7) == cudaSuccess); });
  while (!waits) std::this_thread::yield();
  work();
  goes_on = true;
  other.join();
}

void a_launch_that_waits_holds_up_no_other_stream() {
  while_stream_7_waits([] { CHECK(launch({1}, 2, 8) == cudaSuccess); });
  CHECK(runtime.launches.size() == 2 && last().stream == stream(7));
}

void a_graph_lives_until_it_is_launched() {
  while_stream_7_waits([] {
    for (size_t on = 8; on < 80; ++on) CHECK(launch({1}, 2, on) == cudaSuccess);
  });
  CHECK(last().stream == stream(7) && runtime.execs_alive == 64 && runtime.graphs_alive == 64);
}

void threads_have_parameters_of_their_own() {
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number)
    threads.emplace_back([number] {
      for (int i = 0; i < 500; ++i) CHECK(launch({1, 2}, number, 7 + number % 2) == cudaSuccess);
    });
  for (std::thread& thread : threads) thread.join();
  std::map<int, int> count;
  for (const Launched& one : runtime.launches) {
    CHECK(one.values[0] == one.values[1] && one.stream == stream(7 + one.values[0] % 2));
    ++count[one.values[0]];
  }
  for (int number = 0; number < 4; ++number) CHECK(count[number] == 500);
  CHECK(runtime.graphs_made == 2);
}

const std::map<std::string, void (*)()> kScenarios = {
#define SCENARIO(name) {#name, name}
    SCENARIO(one_graph_for_each_stream_and_choice),
    SCENARIO(those_that_were_launched_last_are_kept),
    SCENARIO(captures_get_the_kernels),
    SCENARIO(failing_graphs_are_left_out),
    SCENARIO(threads_without_a_context_launch_kernels),
    SCENARIO(a_kernel_that_fails_is_an_error),
    SCENARIO(a_launch_that_waits_holds_up_no_other_stream),
    SCENARIO(a_graph_lives_until_it_is_launched),
    SCENARIO(threads_have_parameters_of_their_own),
};

}  // namespace

// Without an argument: the names of the scenarios.
int main(int argc, char** argv) {
  if (argc == 2) return kScenarios.at(argv[1])(), 0;
  for (const auto& [name, scenario] : kScenarios) std::cout << name << "\n";
}
