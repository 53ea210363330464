// A `cuda` device made of host memory, for a torch that was built without CUDA.
//
// Tensors on it are real `cuda` tensors to everything above the dispatcher: they refuse to be mixed with the CPU's or
// with another device's, autograd runs their backward passes in the device's own thread, and what a GPU would have to
// wait for is told. What computes is the CPU's kernel, on the same memory: arguments, formats, devices, order and
// synchronisation are honest; kernels, their numerics, races, memory and time are not.
//
//     op on cuda tensors -> `run` -> the same op on CPU views of the same memory -> results as cuda tensors
//
// Loaded before torch asks for CUDA's hooks for the first time (tests/stand_in/cuda.py).

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Stream;
using at::Tensor;

constexpr int MOST_DEVICES = 8;
int num_devices = 1;
thread_local DeviceIndex current = 0;
thread_local bool has_failed = false;  // CUDA keeps a thread's last error until somebody asks for it
std::atomic<long> touched[MOST_DEVICES];  // times that a program chose a device, or took memory on it
std::atomic<void (*)(const char*)> listener{nullptr};

bool is_recorded();

void tell(const std::string& what) {
  TORCH_CHECK(what.rfind("sync", 0) != 0 || !is_recorded(), "CUDA error: ", what, " is not permitted when stream is capturing");
  if (auto listen = listener.load()) listen(what.c_str());
}

// Not every choice of a device: autograd has a thread for each, whether or not there will be work for it.
void touch(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices, "CUDA error: invalid device ordinal ", int(index));
  touched[index]++;
}

Device this_device() { return {DeviceType::CUDA, current}; }

// ---- memory: the device's, and pages of the host that the device may read by itself

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    touch(current);
    void* data = nullptr;
    TORCH_CHECK(size == 0 || posix_memalign(&data, 64, size) == 0, "out of memory");
    return {data, data, &std::free, this_device()};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  auto next = pinned.upper_bound(static_cast<const char*>(address));
  return next != pinned.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

void pin(void* address, size_t size) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  pinned[static_cast<const char*>(address)] = size;
}

void unpin(void* address) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  pinned.erase(static_cast<const char*>(address));
}

struct PinnedMemory final : c10::Allocator {
  static void release(void* data) {
    unpin(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t size) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, size ? size : 1) == 0, "out of memory");
    pin(data, size);
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;

// ---- what c10 asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return this_device(); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { tell("sync: stream"); }
  void synchronizeEvent(void*) const override { tell("sync: event"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- ops

bool is_on_device(const Tensor& x) { return x.defined() && x.device().is_cuda(); }

Tensor seen_from(const Tensor& x, Device device) {
  auto keep = [x](void*) {};
  auto options = x.options().device(device).requires_grad(false).pinned_memory(std::nullopt);
  void* data = const_cast<void*>(x.storage().data());
  return at::from_blob(data, x.sizes(), x.strides(), x.storage_offset(), keep, options, device);
}
Tensor on_host(const Tensor& x) { return is_on_device(x) ? seen_from(x, Device(DeviceType::CPU)) : x; }
Tensor on_device(const Tensor& x, Device device) { return !x.defined() || x.device().is_cuda() ? x : seen_from(x, device); }

// ---- graphs: what is done between begin and end is left without effect, and done again on the same memory when asked
//
// The memory that ops get meanwhile stays theirs, as that of a graph's pool does; a host that would have to wait is
// refused, as are numbers of the host's that only its own pages have.

struct Graph {
  std::vector<std::function<void()>> ops;
  std::vector<std::pair<Tensor, Tensor>> before;  // memory that was written to, and what it held, the oldest first
};

std::map<int, Graph> graphs;
int last_graph = 0;
Graph* under_way = nullptr;
std::thread::id recorder;
std::vector<c10::intrusive_ptr<c10d::Work>> sent;  // while a graph is repeated: whom nobody has to wait for
thread_local bool is_aside = false;  // within a kernel in Python, which is recorded as one

// A backward pass runs in a thread of the device's.
bool is_recorded() {
  return under_way && !is_aside &&
      (std::this_thread::get_id() == recorder || torch::autograd::get_current_graph_task_id() != -1);
}

void keep_what_was(const Tensor& x) {
  const Tensor seen = on_host(x);
  if (seen.numel()) under_way->before.emplace_back(seen, seen.clone());
}

void record(std::function<void()> op) { under_way->ops.push_back(std::move(op)); }

void put_into(const IValue& old, const IValue& made) {
  if (old.isTensor() && old.toTensor().defined()) {
    const Tensor to = old.toTensor(), from = made.toTensor();
    if (from.numel() && to.const_data_ptr() != from.const_data_ptr()) to.copy_(from);
  } else if (old.isTensorList()) {
    for (size_t index = 0; index < old.toTensorVector().size(); index++) put_into(old.toTensorVector()[index], made.toTensorVector()[index]);
  }
}

// Change every tensor in a value, however deep its lists are.
template <typename F>
IValue with_tensors(const IValue& value, const F& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> list = value.toTensorVector();
    for (Tensor& each : list) each = change(each);
    return list;
  }
  if (value.isList()) {
    auto from = value.toList();
    auto list = c10::impl::GenericList(from.elementType());
    for (const IValue& each : from) list.push_back(with_tensors(each, change));
    return list;
  }
  return value;
}

// The one device that an op's tensors are on; numbers without dims may come from the host.
Device device_of(const std::string& name, const std::vector<IValue>& arguments) {
  std::optional<Device> found;
  bool has_host = false;
  auto look = [&](const Tensor& x) {
    if (is_on_device(x)) {
      TORCH_CHECK(!found || *found == x.device(), name, " is given tensors of ", *found, " and of ", x.device());
      found = x.device();
    } else {
      has_host |= x.defined() && x.dim() > 0;
    }
    return x;
  };
  for (const IValue& each : arguments) with_tensors(each, look);
  const bool takes_both = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
  TORCH_CHECK(!found || !has_host || takes_both, name, " is given tensors of the host and of ", *found);
  if (found && has_host) tell("sync: upload of indices");
  return found.value_or(this_device());
}

// What the real kernel of an op has to wait for: sizes that are in the data, or a table that it sends to the device.
void tell_waiting(const std::string& name, const std::vector<IValue>& arguments) {
  static const char* const NAMES[] = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"};
  for (const char* each : NAMES) {
    if (name == std::string("aten::") + each) tell("sync: " + name);
  }
  if (name == "aten::repeat_interleave" && arguments[0].isTensor()) tell("sync: " + name);
  const bool is_index = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
  if (is_index && arguments.size() > 1 && arguments[1].isList()) {
    with_tensors(arguments[1], [&](const Tensor& x) {
      if (x.defined() && x.scalar_type() == at::kBool) tell("sync: " + name + " by a mask");
      return x;
    });
  }
  const bool is_scatter = name.rfind("aten::scatter", 0) == 0 && arguments[0].toTensor().dim() > 1;
  if (is_scatter && at::globalContext().deterministicAlgorithms()) tell("sync: deterministic " + name);
}

void record_op(
    const c10::OperatorHandle& op,
    const std::vector<IValue>& given,
    const std::vector<IValue>& results,
    const std::vector<std::pair<Tensor, Tensor>>& empty_outputs) {
  std::vector<std::pair<Tensor, Tensor>> outputs;
  for (const auto& [output, result] : empty_outputs) outputs.emplace_back(on_host(output), result);
  record([op, given, results, outputs] {
    torch::jit::Stack stack(given);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    for (size_t index = 0; index < results.size(); index++) {
      if (stack[index].isCustomClass()) {
        auto work = stack[index].toCustomClass<c10d::Work>();
        op.schema().name() == "c10d::send" ? sent.push_back(work) : (void)work->wait();
      } else {
        put_into(results[index], stack[index]);
      }
    }
    for (const auto& [output, result] : outputs) put_into(output, result);
  });
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  TORCH_CHECK(!std::exchange(has_failed, false), "CUDA error: left behind by an earlier call");
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size(), first = stack->size() - num_arguments;
  const std::vector<IValue> given(stack->begin() + first, stack->end());
  const Device device = device_of(schema.name(), given);
  tell_waiting(schema.name(), given);
  std::vector<std::pair<Tensor, Tensor>> empty_outputs;  // they get their size from the op
  const bool is_kept = is_recorded();
  for (size_t index = 0; index < num_arguments; index++) {
    const auto* alias = schema.arguments()[index].alias_info();
    IValue& value = (*stack)[first + index];
    if (is_kept && alias && alias->isWrite() && value.isTensor()) keep_what_was(value.toTensor());
    if (value.isDevice()) {
      value = Device(DeviceType::CPU);
    } else if (alias && alias->isWrite() && value.isTensor() && is_on_device(value.toTensor()) && !value.toTensor().numel()) {
      empty_outputs.emplace_back(value.toTensor(), at::empty_like(value.toTensor(), at::kCPU));
      value = empty_outputs.back().second;
    } else {
      value = with_tensors(value, on_host);
    }
  }
  const std::vector<IValue> on_hosts(stack->begin() + first, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [output, result] : empty_outputs) {
    if (result.numel()) on_host(output.resize_(result.sizes())).copy_(result);
  }
  const size_t num_results = schema.returns().size(), base = stack->size() - num_results;
  if (is_kept) record_op(op, on_hosts, std::vector<IValue>(stack->begin() + base, stack->end()), empty_outputs);
  for (size_t index = 0; index < num_results; index++) {
    IValue& value = (*stack)[base + index];
    const auto* alias = schema.returns()[index].alias_info();
    value = with_tensors(value, [&](const Tensor& x) { return on_device(x, device); });
    for (size_t other = 0; alias && alias->isWrite() && other < num_arguments; other++) {
      const auto* source = schema.arguments()[other].alias_info();
      if (source && source->beforeSets() == alias->beforeSets()) value = given[other];
    }
  }
}

Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard chosen(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard chosen(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// A copy over the bus blocks unless it may be late, and one into pages that may move always does.
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  TORCH_CHECK(!std::exchange(has_failed, false), "CUDA error: left behind by an earlier call");
  if (from.numel() && is_on_device(to) != is_on_device(from)) {
    const bool is_upload = is_on_device(to);
    const bool is_free = non_blocking && is_pinned((is_upload ? from : to).const_data_ptr()) && !is_recorded();
    const std::string what = is_upload ? "upload" : "download";
    tell(is_free ? what : "sync: " + what);
  }
  if (is_recorded()) {
    keep_what_was(to);
    record([to = on_host(to), from = on_host(from)] { to.copy_(from); });
  }
  on_host(to).copy_(on_host(from));
  return to;
}

at::Scalar local_scalar(const Tensor& x) {
  tell("sync: number");
  return at::_local_scalar_dense(on_host(x));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("view", [](const Tensor& x, c10::SymIntArrayRef size) {
    return at::native::view(x, C10_AS_INTARRAYREF_SLOW(size));
  });
  library.impl("as_strided", [](const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
    auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
    return at::native::as_strided_tensorimpl(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
  });
  library.impl("_reshape_alias", [](const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", [](const Tensor& x, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(x, C10_AS_INTARRAYREF_SLOW(size), format);
  });
  library.impl("set_", [](Tensor& x) -> Tensor& { return at::native::set_cpu_(x); });
  library.impl("set_.source_Tensor", [](Tensor& x, const Tensor& source) -> Tensor& { return at::native::set_tensor_(x, source); });
  library.impl("set_.source_Storage", [](Tensor& x, at::Storage source) -> Tensor& { return at::native::set_(x, source); });
  library.impl("set_.source_Storage_storage_offset", [](Tensor& x, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) -> Tensor& {
    return at::native::set_storage_cpu_(
        x, source, offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
}

// Collectives of `cuda` tensors are gloo's on the same memory.
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (const char* name :
       {"send", "recv_", "recv_any_source_", "broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_",
        "_allgather_base_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_", "gather_", "scatter_",
        "reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_", "alltoall_base_", "alltoall_", "barrier"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

// For kernels written in Python: the same memory as the host's, and the other way round.
TORCH_LIBRARY(stand_in, library) {
  library.def("host(Tensor x) -> Tensor", [](const Tensor& x) { return on_host(x); });
  library.def("device(Tensor x, Tensor like) -> Tensor", [](const Tensor& x, const Tensor& like) {
    return on_device(x, like.device());
  });
  library.def("written(Tensor x) -> ()", [](const Tensor& x) { keep_what_was(x); });
}

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex index) const override { return touched[index] > 0; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({DeviceType::CUDA, index}); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)  // looked up by this very name
}  // namespace at

// ---- for cuda.py

extern "C" {
void stand_in_begin(int devices, void (*listen)(const char*)) {
  num_devices = devices;
  listener = listen;
}
int stand_in_device() { return current; }
void stand_in_choose(int index) {
  touch(index);
  current = index;
}
long stand_in_touched(int index) { return touched[index]; }
void stand_in_pin(void* address, size_t size) { pin(address, size); }
void stand_in_unpin(void* address) { unpin(address); }
void stand_in_fail() { has_failed = true; }
int stand_in_begin_graph() {
  under_way = &graphs[++last_graph];
  recorder = std::this_thread::get_id();
  return last_graph;
}
void stand_in_end_graph() {
  Graph& graph = *std::exchange(under_way, nullptr);
  for (auto each = graph.before.rbegin(); each != graph.before.rend(); each++) each->first.copy_(each->second);
  graph.before.clear();
}
void stand_in_aside(bool is_on) { is_aside = is_on; }
bool stand_in_is_recorded() { return is_recorded(); }
void stand_in_record(void (*op)()) { record(op); }
void stand_in_replay(int number) {
  for (const auto& op : graphs.at(number).ops) op();
  for (auto& work : std::exchange(sent, {})) work->wait();
}
void stand_in_forget(int number) { graphs.erase(number); }
}
