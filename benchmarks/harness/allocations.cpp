// An allocator of torch's CPU memory that counts the bytes it has given out, on any thread.
#include <algorithm>
#include <mutex>
#include <unordered_map>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pybind11/pybind11.h>

namespace {

// Never destroyed: other static objects may free tensors at exit.
std::mutex& lock = *new std::mutex;
std::unordered_map<void*, size_t>& sizes = *new std::unordered_map<void*, size_t>;
size_t live = 0;
size_t peak = 0;

void release(void* data) {
  {
    std::lock_guard<std::mutex> guard(lock);
    auto found = sizes.find(data);
    if (found != sizes.end()) {
      live -= found->second;
      sizes.erase(found);
    }
  }
  c10::free_cpu(data);
}

struct CountingAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    if (data != nullptr) {
      std::lock_guard<std::mutex> guard(lock);
      sizes[data] = size;
      live += size;
      peak = std::max(peak, live);
    }
    return {data, data, &release, at::Device(at::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* into, const void* from, std::size_t count) const override {
    default_copy_data(into, from, count);
  }
};

CountingAllocator allocator;

size_t take_peak() {
  std::lock_guard<std::mutex> guard(lock);
  size_t taken = peak;
  peak = live;
  return taken;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", [] { c10::SetCPUAllocator(&allocator, 200); }, "Count what is allocated from here on.");
  module.def("take_peak", &take_peak, "Return the most bytes alive since the last call.");
}
