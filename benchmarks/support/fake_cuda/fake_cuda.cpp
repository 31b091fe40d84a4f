// The parts of CUDA that torch's autograd engine, pinned memory and FakeTensorMode ask for, without a GPU: one device,
// one stream, and operations on events and streams that do nothing. torch's own NoOpDeviceGuardImpl raises for events.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

namespace fake_cuda {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

const Device kDevice(DeviceType::CUDA, 0);
const Stream kStream(Stream::DEFAULT, kDevice);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return kStream; }
  Stream getDefaultStream(Device) const override { return kStream; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return kStream; }
  Stream getNewStream(Device, int) const override { return kStream; }
  Stream exchangeStream(Stream) const noexcept override { return kStream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  bool isStreamCapturing(const Stream&) const override { return false; }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// Memory of the CPU allocator whose addresses are kept, so that Tensor.is_pinned answers as on a GPU machine.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* start = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> lock(mutex());
    blocks()[static_cast<char*>(start)] = bytes;
    return {start, start, &release, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static bool contains(const void* pointer) {
    const char* address = static_cast<const char*>(pointer);
    std::lock_guard<std::mutex> lock(mutex());
    auto next = blocks().upper_bound(const_cast<char*>(address));
    if (next == blocks().begin()) return false;
    auto block = std::prev(next);
    return address < block->first + block->second;
  }

 private:
  static void release(void* start) {
    if (start == nullptr) return;
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks().erase(static_cast<char*>(start));
    }
    c10::GetCPUAllocator()->raw_deallocate(start);
  }
  static std::map<char*, size_t>& blocks() {
    static auto* blocks = new std::map<char*, size_t>;  // outlives tensors that are freed at exit
    return *blocks;
  }
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return PinnedMemory::contains(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* memory = new PinnedMemory;
    return memory;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace fake_cuda

namespace at {
using FakeCudaHooks = ::fake_cuda::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeCudaHooks)
}  // namespace at
