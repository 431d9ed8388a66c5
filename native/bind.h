// What the files that know both Python and the runtime share: arrays, named tuples, rows.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>

#include "runtime/bench.h"
#include "runtime/cpu.h"
#include "runtime/logits.h"
#include "runtime/model.h"
#include "runtime/pack.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace octavo;

void bind_kernels(nb::module_& m);  // kernels and the sampler by themselves
void bind_pictures(nb::module_& m);

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Table2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::ndarray<nb::numpy, float, nb::ndim<2>> new_matrix(size_t rows, size_t cols, float*& data) {
  data = new float[rows * cols]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return {data, {rows, cols}, owner};
}

// A field of named tuples. Its place is looked up by name, once for each type of tuple that comes.
class Field {
 public:
  explicit Field(const char* name) : name_(name) {}
  template <class T> T of(nb::handle tuple) {
    if (tuple.type().ptr() != type_) find(tuple);
    try {
      return nb::cast<T>(nb::handle(PyTuple_GetItem(tuple.ptr(), place_)));
    } catch (const nb::cast_error&) {
      throw nb::type_error((std::string(name_) + " is of the wrong type, or too large").c_str());
    }
  }
 private:
  void find(nb::handle tuple) {
    if (!PyTuple_Check(tuple.ptr()) || !nb::hasattr(tuple, "_fields"))
      throw nb::type_error("not a named tuple");
    place_ = nb::cast<Py_ssize_t>(tuple.attr("_fields").attr("index")(name_));
    type_ = tuple.type().inc_ref().ptr();  // kept for good, so that no other type takes its address
  }
  const char* name_;
  PyObject* type_ = nullptr;
  Py_ssize_t place_ = 0;
};

// A struct that Python makes of keywords, each the name of a field.
template <class T> nb::class_<T> keyword_struct(nb::module_& m, const char* name) {
  nb::class_<T> c(m, name);
  c.def("__init__", [](nb::pointer_and_handle<T> self, nb::kwargs fields) {
    new (self.p) T{};
    nb::inst_mark_ready(self.h);
    for (const auto& [field, value] : fields) {
      if (!nb::hasattr(self.h.type(), field))
        throw nb::type_error((nb::cast<std::string>(field) + ": no such field").c_str());
      nb::setattr(self.h, field, value);
    }
  });
  return c;
}

KvType kv_type(const std::string& name) {
  if (name == "f32") return KV_F32;
  if (name == "bf16") return KV_BF16;
  if (name == "int8") return KV_INT8;
  throw std::invalid_argument("no such KV type");
}

using AdjustmentTuple = std::tuple<int, float, float>;  // token, addend, repetition penalty
using SampleTuple = std::tuple<int, float, std::vector<int>, std::vector<float>>;

// A row as backends/base.py names its fields. The mask is empty or holds 4 bytes for every 32
// tokens.
SamplingRow sampling_row(nb::handle row, int vocabulary, std::vector<Adjustment>& adjustments) {
  static Field temperature("temperature"), top_p("top_p"), min_p("min_p"), typical_p("typical_p"),
      top_k("top_k"), logprobs("logprobs"), target("target"), legal("legal"), seed("seed"),
      position("position"), changes("adjustments"), mask("mask");
  for (nb::handle change : changes.of<nb::list>(row)) {
    const auto [token, add, repetition] = nb::cast<AdjustmentTuple>(change);
    if (token < 0 || token >= vocabulary)
      throw std::invalid_argument("adjusted token is outside the vocabulary");
    adjustments.push_back({token, add, repetition});
  }
  SamplingRow out{};
  out.temperature = temperature.of<float>(row), out.top_p = top_p.of<float>(row),
  out.min_p = min_p.of<float>(row);
  out.typical_p = typical_p.of<float>(row), out.top_k = top_k.of<int>(row),
  out.logprobs = logprobs.of<int>(row);
  out.target = target.of<int>(row), out.legal = legal.of<bool>(row);
  out.seed = seed.of<uint64_t>(row), out.position = position.of<uint64_t>(row);
  out.adjustments = adjustments.data(), out.adjustment_count = int(adjustments.size());
  const nb::bytes bits = mask.of<nb::bytes>(row);  // which the row keeps
  if (bits.size()) out.mask = reinterpret_cast<const uint32_t*>(bits.c_str());
  if (out.target >= vocabulary)
    throw std::invalid_argument("target token is outside the vocabulary");
  if (bits.size() && bits.size() != size_t(vocabulary + 31) / 32 * 4)
    throw std::invalid_argument("mask and vocabulary disagree in length");
  return out;
}

}  // namespace
