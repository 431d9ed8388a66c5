// The only file that knows both Python and the runtime: checks arrays, releases the GIL, converts results.
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
    if (!PyTuple_Check(tuple.ptr()) || !nb::hasattr(tuple, "_fields")) throw nb::type_error("not a named tuple");
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
      if (!nb::hasattr(self.h.type(), field)) throw nb::type_error((nb::cast<std::string>(field) + ": no such field").c_str());
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

// A row as backends/base.py names its fields. The mask is empty or holds 4 bytes for every 32 tokens.
SamplingRow sampling_row(nb::handle row, int vocabulary, std::vector<Adjustment>& adjustments) {
  static Field temperature("temperature"), top_p("top_p"), min_p("min_p"), typical_p("typical_p"), top_k("top_k"), logprobs("logprobs"),
      target("target"), legal("legal"), seed("seed"), position("position"), changes("adjustments"), mask("mask");
  for (nb::handle change : changes.of<nb::list>(row)) {
    const auto [token, add, repetition] = nb::cast<AdjustmentTuple>(change);
    if (token < 0 || token >= vocabulary) throw std::invalid_argument("adjusted token is outside the vocabulary");
    adjustments.push_back({token, add, repetition});
  }
  SamplingRow out{};
  out.temperature = temperature.of<float>(row), out.top_p = top_p.of<float>(row), out.min_p = min_p.of<float>(row);
  out.typical_p = typical_p.of<float>(row), out.top_k = top_k.of<int>(row), out.logprobs = logprobs.of<int>(row);
  out.target = target.of<int>(row), out.legal = legal.of<bool>(row);
  out.seed = seed.of<uint64_t>(row), out.position = position.of<uint64_t>(row);
  out.adjustments = adjustments.data(), out.adjustment_count = int(adjustments.size());
  const nb::bytes bits = mask.of<nb::bytes>(row);  // which the row keeps
  if (bits.size()) out.mask = reinterpret_cast<const uint32_t*>(bits.c_str());
  if (out.target >= vocabulary) throw std::invalid_argument("target token is outside the vocabulary");
  if (bits.size() && bits.size() != size_t(vocabulary + 31) / 32 * 4) throw std::invalid_argument("mask and vocabulary disagree in length");
  return out;
}

Span span(nb::handle s) {
  static Field first("first"), length("length"), position("position"), table("table"), adapter("adapter");
  return {first.of<int>(s), length.of<int>(s), position.of<int>(s), table.of<int>(s), adapter.of<int>(s)};
}

std::vector<std::vector<SampleTuple>> step(Model& model, Ints ids, Ints positions, nb::list spans, Ints tables, Ints select,
                                           nb::list rows, Ints types, bool all_logits, int steps,
                                           const std::vector<std::vector<int32_t>>& ends, const std::optional<Matrix2>& embeddings,
                                           const std::optional<Ints>& embedding_rows, const std::optional<Table2>& kv_writes) {
  Step s;
  s.tokens = int(ids.size());
  s.selected = int(select.size());
  s.blocks = int(tables.size());
  s.ids = ids.data();
  s.positions = positions.data();
  s.select = select.data();
  s.tables = tables.data();
  s.types = types.size() ? types.data() : nullptr;
  s.all_logits = all_logits;
  if (types.size() && types.size() != ids.size()) throw std::invalid_argument("step arrays disagree in length");
  if (positions.size() != ids.size() || rows.size() > select.size())
    throw std::invalid_argument("step arrays disagree in length");
  for (nb::handle each : spans) s.spans.push_back(span(each));
  if (embeddings || embedding_rows) {
    if (!embeddings || !embedding_rows || embeddings->shape(0) != embedding_rows->size()) throw std::invalid_argument("step arrays disagree in length");
    s.embeddings = embeddings->data(), s.embedding_rows = embedding_rows->data();
    s.embedded = int(embedding_rows->size()), s.embedding_width = int(embeddings->shape(1));
  }
  if (kv_writes) {
    if (kv_writes->shape(1) != 2) throw std::invalid_argument("step arrays disagree in length");
    for (size_t i = 0; i < kv_writes->shape(0); i++) s.kv_writes.push_back({(*kv_writes)(i, 0), (*kv_writes)(i, 1), 0});
  }
  std::vector<std::vector<Adjustment>> adjustments(rows.size());
  std::vector<SamplingRow> sampling;
  for (size_t i = 0; i < rows.size(); i++) sampling.push_back(sampling_row(rows[i], model.width(), adjustments[i]));
  std::vector<std::vector<Sample>> samples;
  {
    nb::gil_scoped_release release;
    if (steps == 1) samples.push_back(model.step(s, sampling));
    else samples = model.decode(s, sampling, steps, ends);
  }
  std::vector<std::vector<SampleTuple>> out(samples.size());
  for (size_t i = 0; i < samples.size(); i++)
    for (Sample& x : samples[i]) out[i].emplace_back(x.token, x.logprob, std::move(x.top_tokens), std::move(x.top_logprobs));
  return out;
}

// Kernel under test: y[m][rows] = x[m][cols] * W^T, in calls of `tile` tokens.
auto linear(const std::string& isa, int type, int group, Bytes data, size_t rows, size_t cols, Matrix2 x, int tile) {
  const Kernels* k = select_kernels(isa);
  const Format format = panel_format(type);
  const size_t m = x.shape(0), padded = padded_cols(cols), bytes = panel_bytes(format, group, cols), panels = (rows + 15) / 16;
  if (x.shape(1) != cols || data.size() != stored_bytes({type, group}, rows, cols)) throw std::invalid_argument("shapes disagree");
  Arena arena(panels * bytes + act_bytes(tile, int(cols), {true, true, true, true}) + panels * 16 * m * 4 + (size_t(1) << 20));
  uint8_t* packed = arena.allocate<uint8_t>(panels * bytes);
  for (size_t p = 0; p < panels; p++) pack_panel({type, group}, data.data(), rows, cols, p, packed + p * bytes);
  const Act act = allocate_act(arena, tile, int(cols), {true, true, true, true});
  float* line = arena.allocate<float>(padded);
  float* out = arena.allocate<float>(m * panels * 16);
  for (size_t t = 0; t < m; t += size_t(tile)) {
    const int count = int(t + size_t(tile) < m ? size_t(tile) : m - t);
    for (int i = 0; i < count; i++) {
      memcpy(line, x.data() + (t + size_t(i)) * cols, cols * sizeof(float));
      k->emit(act, i, line);
    }
    k->linear[format]({packed, bytes, int(padded), act, count, out + t * panels * 16, int(panels * 16), nullptr, nullptr, group}, 0, int(panels));
  }
  float* y;
  auto result = new_matrix(m, rows, y);
  for (size_t t = 0; t < m; t++) memcpy(y + t * rows, out + t * panels * 16, rows * sizeof(float));
  return result;
}

auto unpack(int type, int group, Bytes data, size_t rows, size_t cols) {
  const Format format = panel_format(type);
  if (data.size() != stored_bytes({type, group}, rows, cols)) throw std::invalid_argument("shapes disagree");
  std::vector<uint8_t> panel(panel_bytes(format, group, cols));
  float* y;
  auto result = new_matrix(rows, cols, y);
  for (size_t r = 0; r < rows; r++) {
    if (r % 16 == 0) pack_panel({type, group}, data.data(), rows, cols, r / 16, panel.data());
    unpack_row(format, group, panel.data(), int(r % 16), cols, y + r * cols);
  }
  return result;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Octavo's native runtime: packed weights, paged KV cache, kernels and sampling.";
  m.def("isa", [](const std::string& isa) { return std::string(select_kernels(isa)->name); }, "isa"_a = "");
  m.def("isas", &runnable_isas);
  m.attr("WIDEST_HEAD") = WIDEST_HEAD;
  m.attr("LAYOUT_VERSION") = LAYOUT_VERSION;
  m.def("is_fixed", [](int type) { return is_fixed(panel_format(type)); });
  m.def("matrix_bytes", [](int type, int group, size_t rows, size_t cols) { return Model::matrix_bytes({type, group}, rows, cols); });
  m.def("cache_block_bytes", [](int heads, int head_dim, const std::string& type) {  // of one layer
    return kv_block_bytes(kv_type(type), {heads, head_dim});
  });
  m.def("uniform", &uniform, "seed"_a, "position"_a);
  m.def("linear", &linear, "isa"_a, "type"_a, "group"_a, "data"_a, "rows"_a, "cols"_a, "x"_a, "tile"_a);
  m.def("unpack", &unpack, "type"_a, "group"_a, "data"_a, "rows"_a, "cols"_a);
  m.def("measure_limits", [](const std::string& isa, int threads, size_t bytes, double seconds) {
    nb::gil_scoped_release release;
    const HostLimits l = measure_limits(isa, threads, bytes, seconds);
    return std::make_tuple(l.read_gbs, l.registers_gops, l.widest_gops);
  }, "isa"_a, "threads"_a, "bytes"_a, "seconds"_a);
  m.def("time_linear", &time_linear, "isa"_a, "type"_a, "group"_a, "rows"_a, "cols"_a, "tokens"_a, "threads"_a, "copies"_a, "seconds"_a,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("time_attention", [](const std::string& isa, const std::string& type, int head_dim, int queries, int keys, double seconds) {
    if (queries < 1 || queries > ATTEND_ROWS) throw std::invalid_argument("between 1 and 16 queries");
    return time_attention(isa, kv_type(type), head_dim, queries, keys, seconds);
  }, "isa"_a, "type"_a, "head_dim"_a, "queries"_a, "keys"_a, "seconds"_a);
  m.def("sample", [](const std::string& isa, Floats logits, nb::handle r, bool measured) {  // as the head measures
    const int n = int(logits.size());
    const Kernels* k = select_kernels(isa);
    std::vector<float> values(size_t(set_count(n)) * SET_TOKENS), statistics(Logits::statistics_floats(n));
    memcpy(values.data(), logits.data(), logits.size() * sizeof(float));
    std::vector<Adjustment> a;
    const SamplingRow row = sampling_row(r, n, a);
    Logits l(*k, values.data(), n, statistics.data());
    for (int set = 0; measured && set < set_count(n); set++) l.measure(set, summed_inverse(row, n));
    Sample s = sample(*k, values.data(), statistics.data(), measured, n, row);
    return SampleTuple(s.token, s.logprob, s.top_tokens, s.top_logprobs);
  }, "isa"_a, "logits"_a, "row"_a, "measured"_a = false);

  // What recordings are made of; -1 stands for absent.
  keyword_struct<ActForms>(m, "Forms").def_rw("fixed", &ActForms::fixed).def_rw("grouped", &ActForms::grouped)
      .def_rw("bf16", &ActForms::bf16).def_rw("f32", &ActForms::f32);
  keyword_struct<Model::Part>(m, "LinearPart").def_rw("matrix", &Model::Part::matrix).def_rw("out", &Model::Part::out)
      .def_rw("bias", &Model::Part::bias);
  using Experts = Model::ExpertParts;
  keyword_struct<Experts>(m, "Expert").def_rw("gate", &Experts::gate).def_rw("up", &Experts::up).def_rw("down", &Experts::down)
      .def_rw("gate_bias", &Experts::gate_bias).def_rw("up_bias", &Experts::up_bias).def_rw("down_bias", &Experts::down_bias);
  using Attention = Model::Attention;
  keyword_struct<Attention>(m, "Attention").def_rw("q", &Attention::q).def_rw("k", &Attention::k).def_rw("v", &Attention::v)
      .def_rw("layer", &Attention::layer).def_rw("heads", &Attention::heads).def_rw("kv_heads", &Attention::kv_heads)
      .def_rw("head_dim", &Attention::head_dim).def_rw("schedule", &Attention::schedule).def_rw("q_norm", &Attention::q_norm)
      .def_rw("k_norm", &Attention::k_norm).def_rw("rope", &Attention::rope).def_rw("sinks", &Attention::sinks).def_rw("act", &Attention::act)
      .def_rw("scale", &Attention::scale).def_rw("eps", &Attention::eps).def_rw("softcap", &Attention::softcap)
      .def_rw("interleaved", &Attention::interleaved);

  nb::class_<Model>(m, "Model")
      .def("__init__", [](Model* self, const std::string& isa, int threads, int tokens, int selected) {  // that counts
             new (self) Model(isa, threads, {tokens, selected});
           }, "isa"_a, "threads"_a, "tokens"_a, "selected"_a)
      .def("__init__", [](Model* self, const std::string& isa, int threads, int tokens, int selected, size_t weights, size_t buffers) {
             new (self) Model(isa, threads, {tokens, selected}, weights, buffers);
           }, "isa"_a, "threads"_a, "tokens"_a, "selected"_a, "weight_bytes"_a, "buffer_bytes"_a)
      .def_prop_ro("needs_weights", &Model::needs_weights)
      .def("map_weights", [](Model& self, const std::string& path, size_t bytes) {
        nb::gil_scoped_release release;
        return self.map_weights(path.c_str(), bytes);
      })
      .def("save_weights", [](Model& self, const std::string& path) {
        nb::gil_scoped_release release;
        return self.save_weights(path.c_str());
      })
      .def("add_matrix", [](Model& self, int type, int group, Bytes data, size_t rows, size_t cols) {
        nb::gil_scoped_release release;
        return self.add_matrix({type, group}, data.data(), data.size(), rows, cols);
      })
      .def("add_stored", [](Model& self, int type, Bytes data, size_t rows, size_t cols) {
        return self.add_stored({type, 0}, data.data(), data.size(), rows, cols);
      }, nb::keep_alive<1, 3>())
      .def("read_stored", &Model::read_stored, nb::call_guard<nb::gil_scoped_release>())
      .def("pack", &Model::pack, nb::call_guard<nb::gil_scoped_release>())
      .def("add_vector", [](Model& self, Floats data, size_t n) {
        if (self.needs_weights() && data.size() != n) throw std::invalid_argument("tensor values do not match its shape");
        return self.add_vector(data.data(), n);
      })
      .def("add_buffer", [](Model& self, bool selected, int width) { return self.add_buffer(selected ? Rows::selected : Rows::tokens, width); })
      .def("add_act", [](Model& self, bool selected, int width, ActForms all, ActForms adapted, bool apart) {
        return self.add_act(selected ? Rows::selected : Rows::tokens, width, all, apart, adapted.bf16, adapted.f32);
      }, "selected"_a, "width"_a, "forms"_a, "adapted"_a, "apart"_a)
      .def("add_rope", [](Model& self, Floats f, float factor) { return self.add_rope(f.data(), int(f.size()), factor); })
      .def("add_order", [](Model& self, Ints order) { return self.add_order(order.data(), int(order.size())); })
      .def("allow_adapters", &Model::allow_adapters)
      // Each part: (matrix, type, A [rank][inputs], B [panels of 16 outputs][rank][16], rank, inputs, outputs, scale)
      .def("add_adapter", [](Model& self, const std::vector<std::tuple<int, int, Bytes, Bytes, int, size_t, size_t, float>>& given) {
        std::vector<Adapter::Part> parts;
        for (const auto& [matrix, type, a, b, rank, inputs, outputs, scale] : given) {
          const size_t element = Adapter::element(panel_format(type));
          if (a.size() != size_t(rank) * inputs * element || b.size() != size_t(rank) * align_up(outputs, PANEL) * element)
            throw std::invalid_argument("adapter bytes do not match their shape");
          parts.push_back({matrix, type, a.data(), b.data(), rank, inputs, outputs, scale});
        }
        nb::gil_scoped_release release;
        return self.add_adapter(parts);
      })
      .def("remove_adapter", &Model::remove_adapter)
      .def("add_schedule", &Model::add_schedule)
      .def("embed", &Model::embed)
      .def("select", &Model::select)
      .def("norm", &Model::norm)
      .def("layer_norm", &Model::layer_norm)
      .def("add", &Model::add)
      .def("glu", &Model::glu)
      .def("softcap", &Model::softcap)
      .def("emit", &Model::emit)
      .def("linear", &Model::linear)
      .def("gated", &Model::gated, "source"_a, "gate"_a, "up"_a, "kind"_a, "mid"_a, "act"_a)
      .def("attention", &Model::attention)
      .def("route", &Model::route)
      .def("add_expert_rows", &Model::add_expert_rows, "experts"_a, "used"_a, "hidden"_a, "ffn"_a, "inputs"_a, "between"_a)
      .def("experts", &Model::experts, "x"_a, "routes"_a, "parts"_a, "kind"_a, "rows"_a, "out"_a, "residual"_a)
      .def("output", &Model::output)
      .def("allocate_cache", [](Model& self, const std::vector<std::tuple<int, int>>& layers, int blocks, const std::string& type, int parts) {
        std::vector<KvShape> shapes;
        for (const auto& [heads, head_dim] : layers) shapes.push_back({heads, head_dim});
        self.allocate_cache(shapes, blocks, kv_type(type), parts);
      }, "layers"_a, "blocks"_a, "type"_a, "parts"_a)
      .def("prefault_kv", &Model::prefault_kv, nb::call_guard<nb::gil_scoped_release>())
      .def("copy_block", &Model::copy_block)
      .def("step", &step, "ids"_a, "positions"_a, "spans"_a, "tables"_a, "select"_a, "sampling"_a,
           "types"_a, "all_logits"_a, "steps"_a, "ends"_a, "embeddings"_a = nb::none(), "embedding_rows"_a = nb::none(), "kv_writes"_a = nb::none())
      .def("rows", [](Model& self, int buffer, int first, int count) {  // of a buffer as the last step left it, copied
        const Buffer& from = self.values(buffer);
        float* y;
        auto result = new_matrix(size_t(count), size_t(from.width), y);
        for (int r = 0; r < count; r++) memcpy(y + size_t(r) * size_t(from.width), from.row(first + r), size_t(from.width) * sizeof(float));
        return result;
      })
      .def("profile", [](const Model& self) {  // steps, seconds in them, seconds by kind of operation; since loading
        return std::make_tuple(self.profile().steps(), self.profile().seconds(), self.profile().by_name());
      })
      .def_prop_ro("operations", &Model::operations)
      .def_prop_ro("expert_bytes", &Model::expert_bytes)
      .def_prop_ro("isa", [](const Model& self) { return std::string(self.isa()); })
      .def_prop_ro("threads", &Model::threads)
      .def_prop_ro("weight_bytes", &Model::weight_bytes)
      .def_prop_ro("buffer_bytes", &Model::buffer_bytes)
      .def_prop_ro("cache_bytes", &Model::cache_bytes);
}
