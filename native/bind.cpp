// Checks arrays, releases the GIL, converts results. Only bind*.cpp know Python and the runtime.
#include "bind.h"

namespace {

Span span(nb::handle s) {
  static Field first("first"), length("length"), position("position"), table("table"),
      adapter("adapter");
  return {first.of<int>(s), length.of<int>(s), position.of<int>(s), table.of<int>(s),
      adapter.of<int>(s)};
}

std::vector<std::vector<SampleTuple>> step(Model& model, Ints ids, Ints positions, nb::list spans,
    Ints block_tables, Ints logits_indices, nb::list rows, Ints token_type_ids, bool all_logits,
    int steps, const std::vector<std::vector<int32_t>>& ends,
    const std::optional<Matrix2>& embeddings, const std::optional<Ints>& embedding_rows,
    const std::optional<Table2>& kv_writes, const std::optional<Ints>& reach,
    const std::optional<Table2>& coordinates, const std::optional<Ints>& segments, int first_op,
    const std::optional<int>& last_op, bool brief) {
  Step s;
  s.brief = brief;
  s.tokens = int(ids.size());
  s.selected = int(logits_indices.size());
  s.blocks = int(block_tables.size());
  s.ids = ids.data();
  s.positions = positions.data();
  s.logits_indices = logits_indices.data();
  s.block_tables = block_tables.data();
  s.token_type_ids = token_type_ids.size() ? token_type_ids.data() : nullptr;
  s.all_logits = all_logits;
  if (token_type_ids.size() && token_type_ids.size() != ids.size())
    throw std::invalid_argument("step arrays disagree in length");
  if (positions.size() != ids.size() || rows.size() > logits_indices.size())
    throw std::invalid_argument("step arrays disagree in length");
  for (nb::handle each : spans) s.spans.push_back(span(each));
  if (embeddings || embedding_rows) {
    if (!embeddings || !embedding_rows || embeddings->shape(0) != embedding_rows->size())
      throw std::invalid_argument("step arrays disagree in length");
    s.embeddings = embeddings->data(), s.embedding_rows = embedding_rows->data();
    s.embedded = int(embedding_rows->size()), s.embedding_width = int(embeddings->shape(1));
  }
  if (reach && reach->size() != ids.size())
    throw std::invalid_argument("step arrays disagree in length");
  if (reach) s.reach = reach->data();
  if ((coordinates && coordinates->shape(1) != ids.size()) ||
      (segments && segments->size() != ids.size()))
    throw std::invalid_argument("step arrays disagree in length");
  if (coordinates) s.coordinates = coordinates->data(), s.axes = int(coordinates->shape(0));
  if (segments) s.segments = segments->data();
  s.first_op = first_op, s.last_op = last_op.value_or(model.length());
  if (s.first_op < 0 || s.last_op < s.first_op || s.last_op > model.length())
    throw std::invalid_argument("no such operations");
  if (kv_writes) {
    if (kv_writes->shape(1) != 2) throw std::invalid_argument("step arrays disagree in length");
    for (size_t i = 0; i < kv_writes->shape(0); i++)
      s.kv_writes.push_back({(*kv_writes)(i, 0), (*kv_writes)(i, 1), 0});
  }
  std::vector<std::vector<Adjustment>> adjustments(rows.size());
  std::vector<SamplingRow> sampling;
  for (size_t i = 0; i < rows.size(); i++)
    sampling.push_back(sampling_row(rows[i], model.width(), adjustments[i]));
  std::vector<std::vector<Sample>> samples;
  {
    nb::gil_scoped_release release;
    if (steps == 1) samples.push_back(model.step(s, sampling));
    else samples = model.decode(s, sampling, steps, ends);
  }
  std::vector<std::vector<SampleTuple>> out(samples.size());
  for (size_t i = 0; i < samples.size(); i++)
    for (Sample& x : samples[i])
      out[i].emplace_back(x.token, x.logprob, std::move(x.top_tokens), std::move(x.top_logprobs));
  return out;
}

// What was recorded: names, of each thread its spans as rows of TRACED (backends/base.py), and
// whether spans are missing. Ends the recording.
std::tuple<std::vector<std::string>, std::vector<nb::bytes>, bool> take_trace(Model& model) {
  struct Row { int64_t name, begin, worked, end; double bytes, operations, executed; };
  const char* of_steps[] = {"plan", "wake threads", "sample", "join threads"};  // Trace::Phase
  std::map<std::pair<const Op*, int32_t>, int64_t> known;
  std::vector<std::string> names;
  std::vector<nb::bytes> threads;
  const std::unique_ptr<Trace> trace = model.take_trace();
  for (int thread = 0; trace && thread < model.threads(); thread++) {
    std::vector<Row> rows;
    for (const Trace::Span& s : trace->spans(thread)) {
      const auto [name, added] = known.try_emplace({s.op, s.phase}, int64_t(names.size()));
      if (added)
        names.push_back(s.op ? s.op->name(s.phase) : of_steps[s.phase]);
      rows.push_back({name->second, s.begin, s.worked, s.end, s.cost.bytes, s.cost.operations,
          s.cost.executed});
    }
    threads.emplace_back(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row));
  }
  return {names, threads, trace && trace->full()};
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Octavo's native runtime: packed weights, paged KV cache, kernels and sampling.";
  m.def(
      "isa", [](const std::string& isa) { return std::string(select_kernels(isa)->name); },
      "isa"_a = "");
  m.def("isas", &runnable_isas);
  m.attr("WIDEST_HEAD") = WIDEST_HEAD;
  m.attr("LAYOUT_VERSION") = LAYOUT_VERSION;
  bind_kernels(m);
  bind_pictures(m);

  // What recordings are made of; -1 stands for absent.
  keyword_struct<ActForms>(m, "Forms")
      .def_rw("fixed", &ActForms::fixed)
      .def_rw("grouped", &ActForms::grouped)
      .def_rw("halves", &ActForms::halves)
      .def_rw("scaled", &ActForms::scaled)
      .def_rw("second_lines", &ActForms::second_lines)
      .def_rw("bf16", &ActForms::bf16)
      .def_rw("remainder", &ActForms::remainder)
      .def_rw("f32", &ActForms::f32);
  keyword_struct<Model::Part>(m, "LinearPart")
      .def_rw("matrix", &Model::Part::matrix)
      .def_rw("out", &Model::Part::out)
      .def_rw("bias", &Model::Part::bias);
  using Experts = Model::ExpertParts;
  keyword_struct<Experts>(m, "Expert")
      .def_rw("gate", &Experts::gate)
      .def_rw("up", &Experts::up)
      .def_rw("down", &Experts::down)
      .def_rw("gate_bias", &Experts::gate_bias)
      .def_rw("up_bias", &Experts::up_bias)
      .def_rw("down_bias", &Experts::down_bias);
  using Attention = Model::Attention;
  keyword_struct<Attention>(m, "Attention")
      .def_rw("q", &Attention::q)
      .def_rw("k", &Attention::k)
      .def_rw("v", &Attention::v)
      .def_rw("layer", &Attention::layer)
      .def_rw("heads", &Attention::heads)
      .def_rw("kv_heads", &Attention::kv_heads)
      .def_rw("head_dim", &Attention::head_dim)
      .def_rw("schedule", &Attention::schedule)
      .def_rw("q_norm", &Attention::q_norm)
      .def_rw("k_norm", &Attention::k_norm)
      .def_rw("rope", &Attention::rope)
      .def_rw("sinks", &Attention::sinks)
      .def_rw("act", &Attention::act)
      .def_rw("scale", &Attention::scale)
      .def_rw("eps", &Attention::eps)
      .def_rw("softcap", &Attention::softcap)
      .def_rw("interleaved", &Attention::interleaved)
      .def_rw("remainder", &Attention::remainder);

  nb::class_<Model>(m, "Model")
      .def(
          "__init__",
          [](Model* self, const std::string& isa, int threads, int tokens,
              int selected) {  // that counts
            new (self) Model(isa, threads, {tokens, selected});
          },
          "isa"_a, "threads"_a, "tokens"_a, "selected"_a)
      .def(
          "__init__",
          [](Model* self, const std::string& isa, int threads, int tokens, int selected,
              size_t weights, size_t buffers, const Model* beside) {
            new (self) Model(isa, threads, {tokens, selected}, weights, buffers, beside);
          },
          "isa"_a, "threads"_a, "tokens"_a, "selected"_a, "weight_bytes"_a, "buffer_bytes"_a,
          "beside"_a = nb::none())
      .def_prop_ro("needs_weights", &Model::needs_weights)
      .def("map_weights",
          [](Model& self, const std::string& path, size_t bytes) {
            nb::gil_scoped_release release;
            return self.map_weights(path.c_str(), bytes);
          })
      .def("save_weights",
          [](Model& self, const std::string& path) {
            nb::gil_scoped_release release;
            return self.save_weights(path.c_str());
          })
      .def("add_matrix",
          [](Model& self, int type, int group, Bytes data, size_t rows, size_t cols) {
            nb::gil_scoped_release release;
            return self.add_matrix({type, group}, data.data(), data.size(), rows, cols);
          })
      .def(
          "add_stored",
          [](Model& self, int type, Bytes data, size_t rows, size_t cols) {
            return self.add_stored({type, 0}, data.data(), data.size(), rows, cols);
          },
          nb::keep_alive<1, 3>())
      .def("read_stored", &Model::read_stored, nb::call_guard<nb::gil_scoped_release>())
      .def("pack", &Model::pack, nb::call_guard<nb::gil_scoped_release>())
      .def("add_vector",
          [](Model& self, Floats data, size_t n) {
            if (self.needs_weights() && data.size() != n)
              throw std::invalid_argument("tensor values do not match its shape");
            return self.add_vector(data.data(), n);
          })
      .def("add_buffer",
          [](Model& self, bool selected, int width) {
            return self.add_buffer(selected ? Rows::selected : Rows::tokens, width);
          })
      .def(
          "add_act",
          [](Model& self, bool selected, int width, ActForms all, ActForms adapted, bool apart) {
            return self.add_act(selected ? Rows::selected : Rows::tokens, width, all, apart,
                adapted.bf16, adapted.f32);
          },
          "selected"_a, "width"_a, "forms"_a, "adapted"_a, "apart"_a)
      .def("add_rope",
          [](Model& self, Floats f, float factor, Ints axes) {
            return self.add_rope(
                f.data(), int(f.size()), factor, {axes.data(), axes.data() + axes.size()});
          })
      .def("add_order",
          [](Model& self, Ints order) { return self.add_order(order.data(), int(order.size())); })
      .def("allow_adapters", &Model::allow_adapters)
      // Each part: (matrix, type, A [rank][inputs], B [panels of 16 outputs][rank][16], rank,
      // inputs, outputs, scale)
      .def("add_adapter",
          [](Model& self,
              const std::vector<std::tuple<int, int, Bytes, Bytes, int, size_t, size_t, float>>&
                  given) {
            std::vector<Adapter::Part> parts;
            for (const auto& [matrix, type, a, b, rank, inputs, outputs, scale] : given) {
              const size_t element = Adapter::element(panel_format(type));
              if (a.size() != size_t(rank) * inputs * element ||
                  b.size() != size_t(rank) * align_up(outputs, PANEL) * element)
                throw std::invalid_argument("adapter bytes do not match their shape");
              parts.push_back({matrix, type, a.data(), b.data(), rank, inputs, outputs, scale});
            }
            nb::gil_scoped_release release;
            return self.add_adapter(parts);
          })
      .def("remove_adapter", &Model::remove_adapter)
      .def("add_schedule", &Model::add_schedule)
      .def("embed", &Model::embed)
      .def("inject", &Model::inject)
      .def("select_rows", &Model::select_rows)
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
      .def("add_expert_rows", &Model::add_expert_rows, "experts"_a, "used"_a, "hidden"_a, "ffn"_a,
          "inputs"_a, "between"_a)
      .def("experts", &Model::experts, "x"_a, "routes"_a, "parts"_a, "kind"_a, "rows"_a, "out"_a,
          "residual"_a)
      .def("output", &Model::output)
      .def(
          "allocate_cache",
          [](Model& self, const std::vector<std::tuple<int, int>>& layers, int blocks,
              const std::string& type, int parts) {
            std::vector<KvShape> shapes;
            for (const auto& [heads, head_dim] : layers) shapes.push_back({heads, head_dim});
            self.allocate_cache(shapes, blocks, kv_type(type), parts);
          },
          "layers"_a, "blocks"_a, "type"_a, "parts"_a)
      .def("prefault_kv", &Model::prefault_kv, nb::call_guard<nb::gil_scoped_release>())
      .def("copy_block", &Model::copy_block)
      .def("step", &step, "ids"_a, "positions"_a, "spans"_a, "block_tables"_a, "logits_indices"_a,
          "sampling"_a, "token_type_ids"_a, "all_logits"_a, "steps"_a, "ends"_a,
          "embeddings"_a = nb::none(), "embedding_rows"_a = nb::none(), "kv_writes"_a = nb::none(),
          "reach"_a = nb::none(), "coordinates"_a = nb::none(), "segments"_a = nb::none(),
          "first_op"_a = 0, "last_op"_a = nb::none(), "brief"_a = false)
      .def("skip", &Model::skip)
      .def("rows",
          [](Model& self, int buffer, int first,
              int count) {  // of a buffer as the last step left it, copied
            const Buffer& from = self.values(buffer);
            if (first < 0 || count < 0 || count > self.rows(buffer) - first)
              throw nb::index_error("rows outside their buffer");
            float* y;
            auto result = new_matrix(size_t(count), size_t(from.width), y);
            for (int r = 0; r < count; r++)
              memcpy(y + size_t(r) * size_t(from.width), from.row(first + r),
                  size_t(from.width) * sizeof(float));
            return result;
          })
      .def("profile",
          [](const Model&
                  self) {  // steps, seconds in them, seconds by kind of operation; since loading
            return std::make_tuple(
                self.profile().steps(), self.profile().seconds(), self.profile().by_name());
          })
      .def("start_trace", &Model::start_trace)
      .def("take_trace", &take_trace)
      .def_prop_ro("length", &Model::length)
      .def_prop_ro("operations", &Model::operations)
      .def_prop_ro("expert_bytes", &Model::expert_bytes)
      .def_prop_ro("isa", [](const Model& self) { return std::string(self.isa()); })
      .def_prop_ro("threads", &Model::threads)
      .def_prop_ro("weight_bytes", &Model::weight_bytes)
      .def_prop_ro("buffer_bytes", &Model::buffer_bytes)
      .def_prop_ro("cache_bytes", &Model::cache_bytes);
}
