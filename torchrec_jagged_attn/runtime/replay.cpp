// Replays what an op does on the host: allocations, launches of compiled kernels, PyTorch's own ops.
//
// An op's Python decides once for each kind of call what to allocate and to launch, and
// recording.py writes that down as a Program. Calls of the same kind then run the program here, and
// no Python. A kind is all but the lengths of first axes: dtypes, devices, other sizes, strides,
// alignment, and every argument that is no tensor. What depends on lengths is an expression of
// them; where the Python branched on one, a guard says for which lengths the program holds.

#include <cuda.h>  // of Triton
#include <dlfcn.h>
#include <torch/extension.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

namespace py = pybind11;
using at::Tensor;
using Numbers = std::vector<int64_t>;

namespace {

// --- The CUDA driver, found when the first kernel is launched: a machine may have none.

void* symbol(const char* library, const char* name) {
  void* const handle = dlopen(library, RTLD_LAZY | RTLD_GLOBAL);
  TORCH_CHECK(handle, "cannot open ", library, ": ", dlerror());
  void* const found = dlsym(handle, name);
  TORCH_CHECK(found, library, " has no ", name);
  return found;
}

void check(CUresult result) {
  if (result == CUDA_SUCCESS) return;
  static const auto describe =
      reinterpret_cast<CUresult (*)(CUresult, const char**)>(symbol("libcuda.so.1", "cuGetErrorString"));
  const char* text = nullptr;
  describe(result, &text);
  TORCH_CHECK(false, "CUDA: ", text ? text : "unknown error");
}

// Threads that PyTorch did not begin may have no context yet.
void ensure_context(int32_t device) {
  static const auto get_current =
      reinterpret_cast<CUresult (*)(CUcontext*)>(symbol("libcuda.so.1", "cuCtxGetCurrent"));
  CUcontext context = nullptr;
  check(get_current(&context));
  if (context) return;
  static const auto retain = reinterpret_cast<CUresult (*)(CUcontext*, CUdevice)>(
      symbol("libcuda.so.1", "cuDevicePrimaryCtxRetain"));
  static const auto set_current =
      reinterpret_cast<CUresult (*)(CUcontext)>(symbol("libcuda.so.1", "cuCtxSetCurrent"));
  check(retain(&context, device));
  check(set_current(context));
}

CUstream current_stream(int32_t device) {
  using Get = int32_t (*)(int32_t, void**);
  static const auto get =
      reinterpret_cast<Get>(symbol("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"));
  void* stream = nullptr;
  TORCH_CHECK(get(device, &stream) == 0, "no current stream of device ", device);
  return static_cast<CUstream>(stream);
}

// Raises where the driver or PyTorch lacks what replays need.
void check_driver() {
  for (const char* name : {"cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuGetErrorString",
                           "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"})
    symbol("libcuda.so.1", name);
  symbol("libtorch_cuda.so", "aoti_torch_get_current_cuda_stream");
}

// --- Programs

// recording.py has these names; another one is refused.
template <typename T>
using Names = std::unordered_map<std::string, T>;

enum Operation {
  CONSTANT, SIZE, STRIDE, LENGTH, ADD, SUBTRACT, MULTIPLY, FLOOR_DIVIDE, MODULO, BIT_LENGTH,
  EQUAL, LESS
};

const Names<Operation> OPERATIONS = {
    {"constant", CONSTANT}, {"size", SIZE}, {"stride", STRIDE}, {"length", LENGTH}, {"add", ADD},
    {"subtract", SUBTRACT}, {"multiply", MULTIPLY}, {"floor_divide", FLOOR_DIVIDE},
    {"modulo", MODULO}, {"bit_length", BIT_LENGTH}, {"equal", EQUAL}, {"less", LESS},
};

struct Expression {
  Operation operation;
  int64_t a, b;  // a constant, an input and its axis, number of a length, or indices of operands
};

int64_t bit_length(int64_t a) { return a ? 64 - __builtin_clzll(a < 0 ? -uint64_t(a) : a) : 0; }

int64_t floor_divide(int64_t a, int64_t b) {
  const int64_t quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)));
}

struct View {  // of a tensor's memory; all else are indices of expressions, in elements
  int64_t memory, offset;
  Numbers sizes, strides;
};

struct Allocate {
  at::ScalarType dtype;
  Numbers sizes;
  bool is_scratch = true;  // for kernels alone, which keep none of it
};

struct CallOperator {  // of PyTorch, which returns one contiguous tensor
  c10::OperatorHandle op;
  std::vector<std::variant<View, c10::IValue>> arguments;
};

struct Descriptor {  // of the tensor memory accelerator, innermost axes first
  int type, swizzle;
  bool nan;
  Numbers sizes, strides;  // indices of expressions; strides from the second axis on
  std::vector<uint32_t> box;
};

// Of a kernel: a pointer to an element of a memory, an expression, a constant of 8 bytes, or a
// descriptor of the memory.
struct Parameter {
  enum Kind { POINTER, EXPRESSION, CONSTANT_BITS, DESCRIPTOR } kind;
  int64_t memory, value, extra;  // extra: bytes of an element, or the number of the descriptor
};

const Names<Parameter::Kind> PARAMETERS = {
    {"pointer", Parameter::POINTER},
    {"expression", Parameter::EXPRESSION},
    {"constant_bits", Parameter::CONSTANT_BITS},
    {"descriptor", Parameter::DESCRIPTOR},
};

constexpr size_t MOST_PARAMETERS = 126, MOST_DESCRIPTORS = 8;  // of a kernel

struct Launch {
  CUfunction function;
  unsigned threads, shared_memory;
  bool overlaps;
  std::array<int64_t, 3> grid;
  std::vector<Parameter> parameters;
};

struct CallPython {  // a kernel in Triton's interpreter
  py::object function;
  std::vector<int64_t> grid;
  std::vector<std::variant<View, int64_t>> arguments;
};

struct Inputs {
  std::vector<Tensor> tensors;
  Numbers lengths;  // which the caller gives
};

struct Program {
  std::vector<Expression> expressions;
  std::vector<std::pair<int64_t, int64_t>> guards;  // index, value
  std::vector<std::variant<Allocate, CallOperator, Launch, CallPython>> steps;
  std::vector<std::optional<View>> outputs;
  std::vector<Descriptor> descriptors;
  std::vector<Numbers> last_uses;  // of each step, memories that none after it reads
};

// Fill in `last_uses`, and what is scratch: an operator may return what it is given.
void finish(Program& program, int64_t num_inputs) {
  std::unordered_map<int64_t, size_t> last;
  std::vector<Allocate*> made(num_inputs);  // of each memory, the step, if it allocates
  const auto use = [&](const auto& arguments, size_t i, bool keeps) {
    for (const auto& argument : arguments) {
      const auto* of = std::get_if<View>(&argument);
      if (!of) continue;
      last[of->memory] = i;
      if (keeps && made[of->memory]) made[of->memory]->is_scratch = false;
    }
  };
  for (size_t i = 0; i < program.steps.size(); ++i) {
    auto& step = program.steps[i];
    auto* const allocate = std::get_if<Allocate>(&step);
    if (const auto* call = std::get_if<CallOperator>(&step)) use(call->arguments, i, true);
    if (const auto* call = std::get_if<CallPython>(&step)) use(call->arguments, i, false);
    if (allocate || std::holds_alternative<CallOperator>(step)) {
      last[made.size()] = i;
      made.push_back(allocate);
    }
    if (const auto* kernel = std::get_if<Launch>(&step))
      for (const auto& parameter : kernel->parameters)
        if (parameter.kind == Parameter::POINTER || parameter.kind == Parameter::DESCRIPTOR)
          last[parameter.memory] = i;
  }
  for (const auto& output : program.outputs) {
    if (!output) continue;
    last.erase(output->memory);
    if (made[output->memory]) made[output->memory]->is_scratch = false;
  }
  program.last_uses.resize(program.steps.size());
  for (const auto& [of, i] : last) program.last_uses[i].push_back(of);
}

// Whether all expressions have a value: none divides by zero.
bool evaluate(const Program& program, const Inputs& inputs, Numbers& values) {
  values.resize(program.expressions.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& [operation, a, b] = program.expressions[i];
    if ((operation == FLOOR_DIVIDE || operation == MODULO) && values[b] == 0) return false;
    switch (operation) {
      case CONSTANT: values[i] = a; break;
      case SIZE: values[i] = inputs.tensors[a].size(b); break;
      case STRIDE: values[i] = inputs.tensors[a].stride(b); break;
      case LENGTH: values[i] = inputs.lengths[a]; break;
      case ADD: values[i] = values[a] + values[b]; break;
      case SUBTRACT: values[i] = values[a] - values[b]; break;
      case MULTIPLY: values[i] = values[a] * values[b]; break;
      case FLOOR_DIVIDE: values[i] = floor_divide(values[a], values[b]); break;
      case MODULO: values[i] = values[a] - floor_divide(values[a], values[b]) * values[b]; break;
      case BIT_LENGTH: values[i] = bit_length(values[a]); break;
      case EQUAL: values[i] = values[a] == values[b]; break;
      case LESS: values[i] = values[a] < values[b]; break;
    }
  }
  return true;
}

bool holds(const Program& program, const Numbers& values) {
  for (const auto& [index, value] : program.guards)
    if (values[index] != value) return false;
  return true;
}

c10::SmallVector<int64_t, 6> select(const Numbers& indices, const Numbers& values) {
  c10::SmallVector<int64_t, 6> selected;
  for (const int64_t index : indices) selected.push_back(values[index]);
  return selected;
}

Tensor view(const View& of, const std::vector<Tensor>& memories, const Numbers& values) {
  const Tensor& memory = memories[of.memory];
  const auto sizes = select(of.sizes, values);
  const auto strides = select(of.strides, values);
  const int64_t offset = values[of.offset];
  if (offset == 0 && memory.sizes() == at::IntArrayRef(sizes) &&
      memory.strides() == at::IntArrayRef(strides))
    return memory;
  return memory.as_strided(sizes, strides, memory.storage_offset() + offset);
}

void encode(CUtensorMap* map, const Descriptor& of, const Tensor& memory, int64_t offset,
            const Numbers& values) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                              const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const auto encode_tiled =
      reinterpret_cast<Encode>(symbol("libcuda.so.1", "cuTensorMapEncodeTiled"));
  static const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
  const int64_t element_size = memory.element_size();
  char* const address = static_cast<char*>(memory.data_ptr()) + offset * element_size;
  cuuint64_t sizes[5], strides[5];
  for (size_t i = 0; i < of.sizes.size(); ++i) sizes[i] = values[of.sizes[i]];
  for (size_t i = 0; i < of.strides.size(); ++i) strides[i] = values[of.strides[i]] * element_size;
  check(encode_tiled(map, CUtensorMapDataType(of.type), of.box.size(), address, sizes, strides,
                     of.box.data(), ones,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CUtensorMapSwizzle(of.swizzle),
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                     of.nan ? CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
                            : CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

void launch(const Program& program, const Launch& step, const std::vector<Tensor>& memories,
            const Numbers& values, CUstream stream) {
  const int64_t x = values[step.grid[0]], y = values[step.grid[1]], z = values[step.grid[2]];
  if (x == 0 || y == 0 || z == 0) return;
  TORCH_CHECK(x <= INT32_MAX && y <= 65535 && z <= 65535, "a grid of ", x, " x ", y, " x ", z);
  uint64_t bits[MOST_PARAMETERS + 2];
  void* pointers[MOST_PARAMETERS + 2];
  alignas(64) CUtensorMap maps[MOST_DESCRIPTORS];
  size_t n = 0, num_maps = 0;
  for (const auto& parameter : step.parameters) {
    switch (parameter.kind) {
      case Parameter::POINTER:
        bits[n] = reinterpret_cast<uint64_t>(memories[parameter.memory].data_ptr()) +
                  values[parameter.value] * parameter.extra;
        break;
      case Parameter::EXPRESSION: bits[n] = values[parameter.value]; break;
      case Parameter::CONSTANT_BITS: bits[n] = parameter.value; break;
      case Parameter::DESCRIPTOR: {
        encode(&maps[num_maps], program.descriptors[parameter.extra], memories[parameter.memory],
               values[parameter.value], values);
        pointers[n++] = &maps[num_maps++];
        continue;
      }
    }
    pointers[n] = &bits[n];
    ++n;
  }
  bits[n] = bits[n + 1] = 0;  // scratch memories, which our kernels have none of
  pointers[n] = &bits[n];
  pointers[n + 1] = &bits[n + 1];
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = x;
  config.gridDimY = y;
  config.gridDimZ = z;
  config.blockDimX = step.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = step.shared_memory;
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = step.overlaps ? 1 : 0;
  using LaunchKernel = CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**);
  static const auto launch_kernel =
      reinterpret_cast<LaunchKernel>(symbol("libcuda.so.1", "cuLaunchKernelEx"));
  check(launch_kernel(&config, step.function, pointers, nullptr));
}

Tensor call_operator(const CallOperator& step, const std::vector<Tensor>& memories,
                     const Numbers& values) {
  torch::jit::Stack stack;
  for (const auto& argument : step.arguments) {
    if (const auto* of = std::get_if<View>(&argument))
      stack.emplace_back(view(*of, memories, values));
    else
      stack.push_back(std::get<c10::IValue>(argument));
  }
  step.op.callBoxed(stack);
  Tensor out = std::move(stack[0]).toTensor();
  TORCH_CHECK(out.is_contiguous(), step.op.operator_name(), " gave what is not contiguous");
  return out;
}

void call_python(const CallPython& step, const std::vector<Tensor>& memories, const Numbers& values) {
  py::gil_scoped_acquire gil;
  py::list arguments;
  for (const auto& argument : step.arguments) {
    if (const auto* of = std::get_if<View>(&argument))
      arguments.append(py::cast(view(*of, memories, values)));
    else
      arguments.append(py::int_(values[std::get<int64_t>(argument)]));
  }
  py::tuple grid(step.grid.size());
  for (size_t i = 0; i < step.grid.size(); ++i) grid[i] = py::int_(values[step.grid[i]]);
  step.function(grid, arguments);
}

// Scratch of a run is one allocation, up to what PyTorch's allocator on CUDA cuts out of its small
// blocks. Beyond that, what is freed between steps is worth more.
constexpr int64_t MOST_WORKSPACE = 1 << 20, ALIGNMENT = 256;  // bytes

// A tensor at a byte of the workspace.
Tensor in_workspace(const Tensor& workspace, int64_t begin, at::ScalarType dtype,
                    at::IntArrayRef sizes) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(workspace.storage()), workspace.key_set(), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_offset(begin / int64_t(c10::elementSize(dtype)));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

std::vector<Tensor> run(const Program& program, const std::vector<Tensor>& inputs,
                        const Numbers& values) {
  const Tensor& first = inputs[0];
  const c10::OptionalDeviceGuard guard(first.device());
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const bool on_gpu = first.is_cuda();
  if (on_gpu) ensure_context(first.get_device());
  const CUstream stream = on_gpu ? current_stream(first.get_device()) : nullptr;
  std::vector<Tensor> memories;
  memories.reserve(inputs.size() + program.steps.size());
  memories.insert(memories.end(), inputs.begin(), inputs.end());
  c10::SmallVector<int64_t, 16> begins;  // in the workspace, of what is allocated; -1 elsewhere
  int64_t workspace_size = 0;
  for (const auto& step : program.steps) {
    const auto* const allocate = std::get_if<Allocate>(&step);
    if (!allocate) continue;
    int64_t size = c10::elementSize(allocate->dtype);
    for (const int64_t index : allocate->sizes) size *= values[index];
    const int64_t end = workspace_size + (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const bool fits = allocate->is_scratch && size > 0 && end <= MOST_WORKSPACE;
    begins.push_back(fits ? workspace_size : -1);
    if (fits) workspace_size = end;
  }
  Tensor workspace;
  if (workspace_size > 0)
    workspace = at::empty({workspace_size}, first.options().dtype(at::kByte));
  auto begin = begins.begin();
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const auto& step = program.steps[i];
    if (const auto* allocate = std::get_if<Allocate>(&step)) {
      const auto sizes = select(allocate->sizes, values);
      memories.push_back(*begin < 0 ? at::empty(sizes, first.options().dtype(allocate->dtype))
                                    : in_workspace(workspace, *begin, allocate->dtype, sizes));
      ++begin;
    } else if (const auto* call = std::get_if<CallOperator>(&step)) {
      memories.push_back(call_operator(*call, memories, values));
    } else if (const auto* kernel = std::get_if<Launch>(&step)) {
      launch(program, *kernel, memories, values, stream);
    } else {
      call_python(std::get<CallPython>(step), memories, values);
    }
    for (const int64_t memory : program.last_uses[i]) memories[memory].reset();
  }
  std::vector<Tensor> outputs;
  outputs.reserve(program.outputs.size());
  for (const auto& output : program.outputs)
    outputs.push_back(output ? view(*output, memories, values) : Tensor());
  return outputs;
}

// --- Programs of an op, by the kind of the call

struct HashNumbers {
  size_t operator()(const Numbers& numbers) const {
    size_t hash = 0xcbf29ce484222325;
    for (const int64_t number : numbers) hash = (hash ^ size_t(number)) * 0x100000001b3;
    return hash;
  }
};

// Of keys of which some never come again, as where a float or a stride changes from call to call:
// after the first ones, a key is kept that comes a second time.
class Seen {
 public:
  explicit Seen(size_t most) : most_(most) {}

  bool came_before(const Numbers& key) {
    if (keys_.erase(key)) return true;
    if (keys_.size() == most_) keys_.clear();
    keys_.insert(key);
    return false;
  }

 private:
  size_t most_;
  std::unordered_set<Numbers, HashNumbers> keys_;
};

// All of a tensor but its length along ``axis``, if it is not -1, and the strides before it.
void describe(const Tensor& tensor, int64_t axis, Numbers& kind) {
  if (!tensor.defined()) {
    kind.push_back(-1);
    return;
  }
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t remainder = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16;
  kind.push_back((int64_t(tensor.scalar_type()) * 64 + int64_t(sizes.size())) * 16 + remainder);
  kind.push_back(int64_t(tensor.device().type()) * 256 + tensor.device().index());
  for (int64_t i = 0; i < int64_t(sizes.size()); ++i) {
    if (i != axis) kind.push_back(sizes[i]);
    if (i >= axis) kind.push_back(strides[i]);
  }
}

constexpr size_t MOST_PROGRAMS = 32;  // of a kind, which differ by their guards; more go to the op
constexpr size_t MOST_KINDS = 4096;  // of an op; then all are forgotten, and recorded anew
constexpr size_t KINDS_KEPT_AT_ONCE = 256;

class Programs {
 public:
  // The program of a kind that holds for these inputs, and what its expressions are; or none.
  std::shared_ptr<const Program> find(const Numbers& kind, const Inputs& inputs, Numbers& values,
                                      bool& is_hopeless) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = programs_.find(kind);
    is_hopeless = false;
    if (found == programs_.end()) {
      is_hopeless = programs_.size() >= KINDS_KEPT_AT_ONCE && !seen_.came_before(kind);
      return nullptr;
    }
    for (const auto& program : found->second) {
      if (!program) {
        is_hopeless = true;
        return nullptr;
      }
      if (evaluate(*program, inputs, values) && holds(*program, values)) return program;
    }
    is_hopeless = found->second.size() >= MOST_PROGRAMS;
    return nullptr;
  }

  // What recording.py gave: a program; None, after which calls of this kind are not replayed; or
  // NotImplemented, after which the next one is recorded.
  void add(const Numbers& kind, const py::object& recorded) {
    if (recorded.ptr() == Py_NotImplemented) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (programs_.size() >= MOST_KINDS) programs_.clear();
    programs_[kind].push_back(
        recorded.is_none() ? nullptr : recorded.cast<std::shared_ptr<Program>>());
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Numbers, std::vector<std::shared_ptr<const Program>>, HashNumbers> programs_;
  Seen seen_{MOST_KINDS};  // that are not recorded
};

// --- Calls

bool is_plain(const Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet plain =
      c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU,
                           DispatchKey::AutogradCUDA, DispatchKey::ADInplaceOrView,
                           DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
  if (!tensor.defined()) return true;
  return (tensor.key_set().raw_repr() & ~plain.raw_repr()) == 0 && !tensor._fw_grad(0).defined();
}

bool is_plain_thread() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !at::impl::torch_function_mode_enabled() && !torch::jit::tracer::isTracing() &&
         !c10::impl::tls_local_dispatch_key_set().included_.has_any(
             c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                  c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                  c10::DispatchKey::Functionalize, c10::DispatchKey::Python}));
}

struct Op {
  std::string name;
  size_t num_tensors, num_lengths;
  std::vector<c10::TypeKind> types;  // of the arguments
  std::vector<bool> differentiable;  // of the tensors
  std::vector<bool> saved;  // for backward, of the tensors and the outputs
  Numbers axes;  // of gradients of outputs, the tensors, and the outputs: where lengths differ
  size_t num_returned;  // of the outputs, the first ones; those of an op with a gradient have one
  // Recorders return a program or None; the last one runs backward without a program.
  py::object record_forward, record_backward, run_backward;
  Programs forward, backward;
};

py::tuple as_tuple(at::TensorList tensors) {
  py::tuple objects(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    objects[i] = tensors[i].defined() ? py::cast(tensors[i]) : py::none();
  return objects;
}

// What was called, but for its tensors and lengths: equal ones are one object, which is kept.
struct Constants {
  py::tuple objects;
  int64_t number;
};

// Of an op. Calls go to the op with what is not kept.
constexpr size_t MOST_CONSTANTS = 1024, CONSTANTS_KEPT_AT_ONCE = 64;

// Add the value of a constant to a key: of floats their bits, which tell zeros apart. False unless
// it is of the schema's type: PyTorch converts others, of which a tensor may change its value.
bool add_constant(PyObject* object, c10::TypeKind kind, Numbers& key) {
  int64_t value = reinterpret_cast<intptr_t>(object);
  if (kind == c10::TypeKind::FloatType && PyFloat_CheckExact(object)) {
    const double number = PyFloat_AS_DOUBLE(object);
    std::memcpy(&value, &number, sizeof value);
  } else if (kind == c10::TypeKind::SymIntType && PyLong_CheckExact(object)) {
    int overflow;
    value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow) return false;
  } else if (kind == c10::TypeKind::StringType && PyUnicode_CheckExact(object)) {
    auto text = py::reinterpret_borrow<py::object>(object);
    PyUnicode_InternInPlace(&text.ptr());  // equal ones are one object then
    value = reinterpret_cast<intptr_t>(text.ptr());
  } else if (!(kind == c10::TypeKind::BoolType && PyBool_Check(object)) &&
             !(kind == c10::TypeKind::ScalarTypeType && THPDtype_Check(object))) {
    return false;
  }
  key.push_back(value);
  return true;
}

// Of products of fp32; -1 where PyTorch refuses to say, being asked in its old way: the op then
// refuses, too, if it has any.
int64_t matmul_precision() {
  try {
    return int64_t(at::globalContext().float32MatmulPrecision());
  } catch (const c10::Error&) {
    return -1;
  }
}

// What programs are looked up by. Of each tensor, it also says which one before it has the same
// address: an op may treat two that are one in another way.
Numbers kind_of(const Constants& constants, const std::vector<Tensor>& tensors, const int64_t* axes) {
  Numbers kind;
  kind.reserve(2 + 8 * tensors.size());
  kind.push_back(constants.number);
  kind.push_back(matmul_precision());
  c10::SmallVector<const void*, 32> addresses;
  for (size_t i = 0; i < tensors.size(); ++i) {
    describe(tensors[i], axes[i], kind);
    addresses.push_back(tensors[i].defined() ? tensors[i].const_data_ptr() : nullptr);
    const auto first = std::find(addresses.begin(), addresses.end(), addresses.back());
    kind.push_back(tensors[i].defined() ? first - addresses.begin() : -1);
  }
  return kind;
}

// All outputs; none where the call is not replayed.
std::vector<Tensor> replay_forward(Op& op, const Inputs& inputs, const Constants& constants) {
  Numbers kind = kind_of(constants, inputs.tensors, op.axes.data() + op.num_returned), values;
  bool is_hopeless = false;
  auto program = op.forward.find(kind, inputs, values, is_hopeless);
  if (!program && !is_hopeless) {
    py::gil_scoped_acquire gil;
    const py::object found =
        op.record_forward(as_tuple(inputs.tensors), inputs.lengths, constants.objects);
    op.forward.add(kind, found);
    program = op.forward.find(kind, inputs, values, is_hopeless);
  }
  if (!program) return {};
  const py::gil_scoped_release no_gil;
  return run(*program, inputs.tensors, values);
}

// Gradients of the tensors that need one, undefined for the others.
std::vector<Tensor> replay_backward(Op& op, const Inputs& inputs, const std::vector<bool>& needs,
                                    const Constants& constants) {
  const auto& tensors = inputs.tensors;
  const bool plain =
      is_plain_thread() && std::all_of(tensors.begin(), tensors.end(), is_plain);
  std::shared_ptr<const Program> program;
  bool is_hopeless = !plain;
  Numbers kind, values;
  if (plain) {
    kind = kind_of(constants, tensors, op.axes.data());
    int64_t mask = 0;
    for (size_t i = 0; i < needs.size(); ++i) mask |= int64_t(needs[i]) << i;
    kind.push_back(mask);
    program = op.backward.find(kind, inputs, values, is_hopeless);
    if (program) return run(*program, tensors, values);
  }
  py::gil_scoped_acquire gil;
  py::tuple asked(needs.size());
  for (size_t i = 0; i < needs.size(); ++i) asked[i] = py::bool_(needs[i]);
  if (!is_hopeless) {
    const py::object found =
        op.record_backward(as_tuple(tensors), asked, inputs.lengths, constants.objects);
    op.backward.add(kind, found);
    program = op.backward.find(kind, inputs, values, is_hopeless);
  }
  if (program) {
    py::gil_scoped_release no_gil;
    return run(*program, tensors, values);
  }
  std::vector<Tensor> grads;
  const py::object found =
      op.run_backward(as_tuple(tensors), asked, inputs.lengths, constants.objects);
  for (const py::handle& grad : found)
    grads.push_back(grad.is_none() ? Tensor() : grad.cast<Tensor>());
  return grads;
}

struct Done {  // hidden from autograd, which would take its tensors for inputs of the node
  Op& op;
  const Constants& constants;
  const Inputs& inputs;
  const std::vector<Tensor>& outputs;
};

class ReplayBackward : public torch::autograd::Function<ReplayBackward> {
 public:
  static constexpr bool is_traceable = true;  // by compiled autograd: the op is called then

  // `differentiable` are those of the inputs that are, as many as are given.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::TensorList& differentiable,
                                                const Done& done) {
    auto tensors = done.inputs.tensors;
    int64_t edges = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      edges |= int64_t(done.op.differentiable[i] && tensors[i].defined()) << i;
      if (!done.op.differentiable[i] && tensors[i].defined() && tensors[i].requires_grad())
        tensors[i] = tensors[i].detach();  // what made it need not be kept
    }
    tensors.insert(tensors.end(), done.outputs.begin(), done.outputs.end());
    for (size_t i = 0; i < tensors.size(); ++i)
      if (!done.op.saved[i]) tensors[i].reset();
    context->save_for_backward(std::move(tensors));
    context->set_materialize_grads(done.op.num_returned > 1);
    // In a list, since compiled autograd takes a number alone for one that may change.
    Numbers numbers = {int64_t(reinterpret_cast<intptr_t>(&done.op)),
                       int64_t(reinterpret_cast<intptr_t>(&done.constants)), edges};
    const auto& lengths = done.inputs.lengths;
    numbers.insert(numbers.end(), lengths.begin(), lengths.end());
    context->saved_data["call"] = std::move(numbers);
    return {done.outputs.begin(), done.outputs.begin() + done.op.num_returned};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const Numbers numbers = context->saved_data["call"].toIntVector();
    Op& op = *reinterpret_cast<Op*>(intptr_t(numbers[0]));
    const auto& constants = *reinterpret_cast<const Constants*>(intptr_t(numbers[1]));
    const auto is_edge = [&](size_t i) { return (numbers[2] >> i & 1) != 0; };
    TORCH_CHECK_NOT_IMPLEMENTED(
        !grads[0].defined() || !at::GradMode::is_enabled(), op.name,
        " has no second derivative, got create_graph=True");
    std::vector<bool> needs;
    size_t edge = 0;
    for (size_t i = 0; i < op.num_tensors; ++i)
      needs.push_back(is_edge(i) && context->needs_input_grad(edge++));
    torch::autograd::variable_list result(edge + 1);  // all arguments of forward
    if (!grads[0].defined()) return result;
    Inputs inputs{context->get_saved_variables(), {numbers.begin() + 3, numbers.end()}};
    inputs.tensors.insert(inputs.tensors.begin(), grads.begin(), grads.end());
    auto found = replay_backward(op, inputs, needs, constants);
    edge = 0;
    for (size_t i = 0; i < op.num_tensors; ++i)
      if (is_edge(i)) result[edge++] = std::move(found[i]);
    return result;
  }
};

// Whether values must be checked, which ops do: see checks.py.
bool must_validate() {
  const char* const value = std::getenv("TORCHREC_JAGGED_ATTN_VALIDATE");
  return value && std::strcmp(value, "1") == 0;
}

struct Call {
  // Both are never freed: nodes of autograd point to them, and may outlive this.
  Op* op;
  std::unordered_map<Numbers, Constants*, HashNumbers> kept;
  Seen seen{MOST_CONSTANTS};  // that are not kept

  // The op's first output, or several; None where the call is not replayed.
  py::object operator()(PyObject* const* arguments, size_t count) {
    const size_t first = op->num_tensors + op->num_lengths;
    if (count < first || count > op->types.size()) return py::none();
    if (!is_plain_thread() || must_validate()) return py::none();
    Inputs inputs;
    auto& tensors = inputs.tensors;
    tensors.reserve(op->num_tensors + 8);
    bool needs_grad = false;
    for (size_t i = 0; i < op->num_tensors; ++i) {
      PyObject* const object = arguments[i];
      if (object == Py_None) {
        tensors.emplace_back();
        continue;
      }
      if (!THPVariable_CheckExact(object)) return py::none();  // a subclass has its own ways
      tensors.push_back(THPVariable_Unpack(object));
      if (!is_plain(tensors.back())) return py::none();
      needs_grad |= op->differentiable[i] && tensors.back().requires_grad();
    }
    for (size_t i = 0; i < op->num_lengths; ++i) {
      PyObject* const object = arguments[op->num_tensors + i];
      if (!PyLong_CheckExact(object)) return py::none();
      inputs.lengths.push_back(PyLong_AsLongLong(object));
      if (PyErr_Occurred()) throw py::error_already_set();
    }
    needs_grad &= at::GradMode::is_enabled();
    if (needs_grad && at::SavedTensorDefaultHooks::get_hooks()) return py::none();
    RECORD_FUNCTION(op->name, std::vector<c10::IValue>());
    Constants* const constants = constants_of(arguments, first, count);
    if (!constants) return py::none();
    auto outputs = replay_forward(*op, inputs, *constants);
    if (outputs.empty()) return py::none();
    if (needs_grad) {
      std::vector<Tensor> differentiable;
      for (size_t i = 0; i < tensors.size(); ++i)
        if (op->differentiable[i] && tensors[i].defined()) differentiable.push_back(tensors[i]);
      const at::TensorList arguments_of_node = differentiable;
      outputs = ReplayBackward::apply(arguments_of_node, Done{*op, *constants, inputs, outputs});
    }
    if (op->num_returned == 1) return py::cast(outputs[0]);
    return as_tuple(at::TensorList(outputs).slice(0, op->num_returned));
  }

 private:
  Constants* constants_of(PyObject* const* arguments, size_t first, size_t count) {
    Numbers key;
    key.reserve(count - first);
    for (size_t i = first; i < count; ++i)
      if (!add_constant(arguments[i], op->types[i], key)) return nullptr;
    if (const auto found = kept.find(key); found != kept.end()) return found->second;
    if (kept.size() == MOST_CONSTANTS) return nullptr;
    if (kept.size() >= CONSTANTS_KEPT_AT_ONCE && !seen.came_before(key)) return nullptr;
    py::tuple objects(count - first);
    for (size_t i = 0; i < objects.size(); ++i) {
      auto object = py::reinterpret_borrow<py::object>(arguments[first + i]);
      if (PyUnicode_CheckExact(object.ptr())) PyUnicode_InternInPlace(&object.ptr());
      objects[i] = object;
    }
    return kept[key] = new Constants{objects, int64_t(kept.size())};
  }
};

// A function of Python that calls `call`, which is never freed, as its op: pybind11's takes longer.
py::object as_function(Call* call) {
  static PyMethodDef method = {
      "replay",
      reinterpret_cast<PyCFunction>(
          +[](PyObject* self, PyObject* const* arguments, Py_ssize_t count) -> PyObject* {
            HANDLE_TH_ERRORS
            auto* const call = static_cast<Call*>(PyCapsule_GetPointer(self, nullptr));
            return (*call)(arguments, count).release().ptr();
            END_HANDLE_TH_ERRORS
          }),
      METH_FASTCALL, nullptr};
  const auto self = py::capsule(call);
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

View view_of(const py::tuple& t) {
  return {t[0].cast<int64_t>(), t[1].cast<int64_t>(), t[2].cast<Numbers>(), t[3].cast<Numbers>()};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("check_driver", &check_driver);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init([](const std::vector<std::tuple<std::string, int64_t, int64_t>>& expressions,
                       const std::vector<std::pair<int64_t, int64_t>>& guards) {
        auto program = std::make_shared<Program>();
        for (const auto& [operation, a, b] : expressions)
          program->expressions.push_back({OPERATIONS.at(operation), a, b});
        program->guards = guards;
        return program;
      }))
      .def("allocate",
           [](Program& self, const py::object& dtype, const Numbers& sizes) {
             const auto type = torch::python::detail::py_object_to_dtype(dtype);
             self.steps.emplace_back(Allocate{type, sizes});
           })
      .def("operator",
           [](Program& self, const std::string& name, const std::string& overload,
              const py::list& arguments) {
             const auto op =
                 c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
             CallOperator step{op, {}};
             for (const auto& parameter : op.schema().arguments()) {
               const size_t i = step.arguments.size();
               if (i >= arguments.size()) {
                 TORCH_CHECK(parameter.default_value(), name, " takes ", parameter.name());
                 step.arguments.emplace_back(*parameter.default_value());
               } else if (py::isinstance<py::tuple>(arguments[i])) {
                 step.arguments.emplace_back(view_of(arguments[i].cast<py::tuple>()));
               } else {
                 const auto value = torch::jit::toIValue(arguments[i], parameter.real_type());
                 step.arguments.emplace_back(value);
               }
             }
             self.steps.emplace_back(std::move(step));
           })
      .def("descriptor",
           [](Program& self, int type, int swizzle, bool nan, Numbers sizes, Numbers strides,
              std::vector<uint32_t> box) {
             TORCH_CHECK(box.size() <= 5, "a descriptor of ", box.size(), " axes");
             std::reverse(sizes.begin(), sizes.end());
             std::reverse(strides.begin(), strides.end());
             std::reverse(box.begin(), box.end());
             strides.erase(strides.begin());
             self.descriptors.push_back({type, swizzle, nan, sizes, strides, box});
           })
      .def("launch",
           [](Program& self, uintptr_t function, unsigned warps, unsigned shared_memory,
              bool overlaps, const std::array<int64_t, 3>& grid,
              const std::vector<std::tuple<std::string, int64_t, int64_t, int64_t>>& parameters) {
             TORCH_CHECK(parameters.size() <= MOST_PARAMETERS, "too many parameters");
             Launch step{reinterpret_cast<CUfunction>(function), 32 * warps, shared_memory, overlaps,
                         grid, {}};
             size_t num_maps = 0;
             for (const auto& [kind, memory, value, extra] : parameters) {
               step.parameters.push_back({PARAMETERS.at(kind), memory, value, extra});
               num_maps += step.parameters.back().kind == Parameter::DESCRIPTOR;
             }
             TORCH_CHECK(num_maps <= MOST_DESCRIPTORS, "too many descriptors");
             self.steps.emplace_back(std::move(step));
           })
      .def("call",
           [](Program& self, const py::object& function, const Numbers& grid,
              const py::list& arguments) {
             CallPython step{function, grid, {}};
             for (const py::handle& argument : arguments) {
               if (py::isinstance<py::tuple>(argument))
                 step.arguments.emplace_back(view_of(argument.cast<py::tuple>()));
               else
                 step.arguments.emplace_back(argument.cast<int64_t>());
             }
             self.steps.emplace_back(std::move(step));
           })
      .def("finish", &finish)
      .def("output", [](Program& self, const py::object& output) {
        if (output.is_none())
          self.outputs.emplace_back();
        else
          self.outputs.emplace_back(view_of(output.cast<py::tuple>()));
      });
  m.def("replay_of",
        [](const std::string& name, size_t num_lengths, const std::vector<bool>& differentiable,
           const std::vector<bool>& saved, const Numbers& axes, size_t num_returned,
           const py::object& record_forward, const py::object& record_backward,
           const py::object& run_backward) {
          std::vector<c10::TypeKind> types;
          const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
          for (const auto& argument : handle.schema().arguments())
            types.push_back(argument.real_type()->kind());
          const size_t num_tensors = differentiable.size();
          auto* const op = new Op{name, num_tensors, num_lengths, types, differentiable, saved, axes,
                                  num_returned, record_forward, record_backward, run_backward};
          return as_function(new Call{op});
        });
}
