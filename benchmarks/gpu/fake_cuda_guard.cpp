// A CUDA device guard and hooks that do nothing: enough for tracing and code generation where there is no CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using Base = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
struct Guard : Base {
  using D = c10::Device;
  using S = c10::Stream;
  static D dev() { return D(c10::DeviceType::CUDA, 0); }
  D exchangeDevice(D) const override { return dev(); }
  D getDevice() const override { return dev(); }
  S getStream(D) const noexcept override { return S(S::DEFAULT, dev()); }
  S getNewStream(D, int = 0) const override { return S(S::DEFAULT, dev()); }
  S exchangeStream(S) const noexcept override { return S(S::DEFAULT, dev()); }
  void record(void**, const S&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const S&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}  // namespace

// once more when torch is loaded: a build with CUDA registers its own then
extern "C" void take_guard() { c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new Guard()); }

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  int getNumGPUs() const override { return 1; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
// preferred to those of a build with CUDA
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}  // namespace at
