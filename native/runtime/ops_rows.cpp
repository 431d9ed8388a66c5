#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops.h"
#include "pack.h"

namespace octavo {
namespace {

constexpr size_t FIRST_FETCH = 8 << 10;  // bytes of weights to ask for before an operation begins

// Zeroes a row's tail so that kernels may work on whole groups.
void pad(float* x, int n, int to) { for (int i = n; i < to; i++) x[i] = 0; }

// The second half of adapters: adds B A x to panels [from, to) of a matrix's result, row t at out + t * stride.
void add_adapters(const Context& c, int part, int matrix, int from, int to, float* out, int stride) {
  for (const AdapterRun& run : c.runs) {
    const LowRank* lr = run.adapter->find(matrix);
    if (!lr) continue;
    const uint8_t* b = lr->b + size_t(from) * PANEL * size_t(lr->rank) * Adapter::element(lr->format);
    for (int t = run.first; t < run.first + run.count; t++)
      c.kernels->add_low_rank[lr->format == BF16](b, lr->rank, c.projected(part, t), to - from, out + size_t(t) * size_t(stride));
  }
}

// Asks for a share's first panels; kernels ask for what follows themselves.
void fetch_panels(const Matrix& m, int panel) {
  const uint8_t* p = m.panels + size_t(panel) * m.panel_bytes;
  for (size_t i = 0; i < FIRST_FETCH; i += 64) __builtin_prefetch(p + i, 0, 2);
}

}  // namespace

void LinearOp::fetch(int thread, const Work& work) const {
  int total = 0;
  for (const LinearPart& p : parts_) total += p.weight.panel_count();
  int begin = work.first(thread, total);
  for (const LinearPart& p : parts_) {
    if (begin < p.weight.panel_count()) return fetch_panels(p.weight, begin);
    begin -= p.weight.panel_count();
  }
}

void GatedOp::fetch(int thread, const Work& work) const {
  const int begin = work.first(thread, out_.shared.k / GROUP) * GROUP / PANEL;
  if (begin >= gate_.weight.panel_count()) return;
  fetch_panels(gate_.weight, begin);
  if (up_.weight.panels) fetch_panels(up_.weight, begin);
}

void EmbedOp::run(Context& c, int, int thread, Work& work) {
  work.each(thread, c.step.tokens, 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      const int32_t* from = index_ == Index::ids ? c.step.ids : index_ == Index::positions ? c.step.positions : c.step.types;
      const int id = (from ? from[t] : 0) + offset_;
      float* out = out_.row(t);
      unpack_row(table_.format, table_.group, table_.panels + size_t(id / PANEL) * table_.panel_bytes, id % PANEL, table_.cols, out);
      for (int i = 0; i < out_.width; i++) out[i] *= scale_;
      pad(out, out_.width, out_.stride);
    }
  });
}

void SelectOp::run(Context& c, int, int thread, Work& work) {
  const Act act = c.wanted(act_.shared);
  work.each(thread, c.step.selected, 1, [&](int begin, int end) {
    for (int i = begin; i < end; i++) {
      memcpy(out_.row(i), in_.row(c.step.select[i]), size_t(in_.stride) * sizeof(float));
      if (act.k) c.kernels->emit(act, i, 0, act.k, out_.row(i));
    }
  });
}

void NormOp::run(Context& c, int, int thread, Work& work) {
  const int rows = c.step.rows(rows_);
  const Act act = c.wanted(act_.of(rows, thread));
  float* y = c.scratch[size_t(thread)];
  each_row(act_, rows, thread, work, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      c.kernels->rms_norm(in_.row(t), weight_, in_.width, eps_, y);
      pad(y, in_.width, int(padded_cols(size_t(in_.width))));
      if (out_.data) {
        float* out = out_.row(t);
        for (int i = 0; i < in_.width; i++) out[i] = residual_.data ? residual_.row(t)[i] + y[i] : y[i];
      }
      if (act.k) c.kernels->emit(act, t, 0, act.k, y);
    }
  });
}

void LayerNormOp::run(Context& c, int, int thread, Work& work) {
  const Act act = c.wanted(act_.shared);
  const int n = in_.width;
  work.each(thread, c.step.rows(rows_), 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      const float* x = in_.row(t);
      float* y = out_.row(t);
      double mean = 0, variance = 0;
      for (int i = 0; i < n; i++) mean += double(x[i]);
      mean /= n;
      for (int i = 0; i < n; i++) variance += (double(x[i]) - mean) * (double(x[i]) - mean);
      const double scale = 1 / std::sqrt(variance / n + double(eps_));
      for (int i = 0; i < n; i++) y[i] = float((double(x[i]) - mean) * scale) * weight_[i] + bias_[i];
      pad(y, n, out_.stride);
      if (act.k) c.kernels->emit(act, t, 0, act.k, y);
    }
  });
}

void AddOp::run(Context& c, int, int thread, Work& work) {
  work.each(thread, c.step.rows(rows_), 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++)
      for (int i = 0; i < out_.width; i++) out_.row(t)[i] = a_.row(t)[i] + b_.row(t)[i];
  });
}

void LowRankOp::run(Context& c, int, int thread, Work& work) {
  const Act& act = act_.of(c.step.tokens, thread);
  const int parts = int(matrices_.size());
  work.each(thread, int(c.runs.size()) * parts, 1, [&](int begin, int end) {
    for (int i = begin; i < end; i++) {
      const AdapterRun& run = c.runs[size_t(i / parts)];
      const LowRank* lr = run.adapter->find(matrices_[size_t(i % parts)]);
      if (!lr) continue;
      Act rows{};
      rows.k = act.k;
      rows.bf16 = act.bf16 + size_t(run.first) * 2 * size_t(act.k);
      rows.f32 = act.f32 + size_t(run.first) * size_t(act.k);
      float* out = c.projected(i % parts, run.first);
      const LinearArgs args{lr->a, lr->panel_bytes, lr->inputs, rows, run.count, out, MAX_RANK, nullptr, nullptr};
      c.kernels->linear[lr->format](args, 0, (lr->rank + PANEL - 1) / PANEL);
      for (int t = 0; t < run.count; t++)
        for (int r = 0; r < lr->rank; r++) out[t * MAX_RANK + r] *= lr->scale;
    }
  });
}

std::string LinearOp::name(int) const {
  size_t out = 0;
  for (const LinearPart& p : parts_) out += p.weight.rows;
  return "linear " + std::to_string(parts_[0].weight.cols) + "->" + std::to_string(out);
}

void LinearOp::run(Context& c, int, int thread, Work& work) {
  const int rows = c.step.rows(rows_);
  if (!rows) return;
  const Act& act = act_.of(rows, thread);
  if (rows_ == Rows::selected && parts_[0].out.data == c.head) return run_head(c, rows, act, thread, work);
  int total = 0;
  for (const LinearPart& p : parts_) total += p.weight.panel_count();
  const int chunk = linear_chunk(parts_[0].weight.panel_bytes);
  work.each(thread, total, chunk, [&](int begin, int end) {
    int base = 0, number = 0;
    for (const LinearPart& p : parts_) {
      const int part = number++;
      const int count = p.weight.panel_count();
      const int from = begin > base ? begin - base : 0, to = end - base < count ? end - base : count;
      base += count;
      if (from >= to) continue;
      const LinearArgs args = p.weight.args(act, rows, p.out.data, p.out.stride, p.bias, p.residual);
      c.kernels->linear[p.weight.format](args, from, to);
      if (rows_ == Rows::tokens) add_adapters(c, part, p.weight.id, from, to, p.out.data + from * PANEL, p.out.stride);
    }
  });
}

// Logits, and their maxima while they are in the core's cache. Of panels that no token may be drawn from, neither.
void LinearOp::run_head(Context& c, int rows, const Act& act, int thread, Work& work) const {
  const LinearPart& p = parts_[0];
  const int panels = p.weight.panel_count(), sets = (panels + PEAK_PANELS - 1) / PEAK_PANELS;
  const LinearArgs args = p.weight.args(act, rows, p.out.data, p.out.stride, p.bias, p.residual);
  work.each(thread, sets, 1, [&](int begin, int end) {
    for (int set = begin; set < end; set++) {
      const int from = set * PEAK_PANELS, to = std::min(from + PEAK_PANELS, panels);
      if (c.live.empty()) c.kernels->linear[p.weight.format](args, from, to);
      else for (int i = from; i < to; i++) if (c.live[size_t(i)]) c.kernels->linear[p.weight.format](args, i, i + 1);
      if (!c.peaks || !c.live.empty()) continue;
      for (int t = 0; t < rows; t++) {
        float* x = p.out.row(t);
        if (to == panels) std::fill(x + p.out.width, x + panels * PANEL, -std::numeric_limits<float>::infinity());  // no tokens
        c.kernels->peaks(x + from * PANEL, (to - from) * PANEL, c.peaks + size_t(t) * size_t(sets * PANEL) + set * PANEL);
      }
    }
  });
}

void GatedOp::run(Context& c, int, int thread, Work& work) {
  const int rows = c.step.rows(rows_), panels = gate_.weight.panel_count();
  const Act out = c.wanted(out_.shared);
  const Act& in = in_.of(rows, thread);
  float* y = c.scratch[size_t(thread)];
  auto project = [&](const LinearPart& p, int part, int group, float* out) {
    constexpr int EACH = GROUP / PANEL;
    const int first = group * EACH, count = panels - first < EACH ? panels - first : EACH;
    if (count < EACH) for (int t = 0; t < rows; t++) memset(out + t * WIDTH, 0, GROUP * sizeof(float));
    if (count <= 0) return;
    const LinearArgs args = p.weight.args(in, rows, out, WIDTH, p.bias ? p.bias + first * PANEL : nullptr, nullptr, first);
    c.kernels->linear[p.weight.format](args, 0, count);
    if (rows_ == Rows::tokens) add_adapters(c, part, p.weight.id, first, first + count, out, WIDTH);
  };
  work.each(thread, out.k / GROUP, 1, [&](int begin, int end) {
    for (int g = begin; g < end; g++) {
      project(gate_, 0, g, y);
      if (up_.weight.panels) project(up_, 1, g, y + GROUP);
      else for (int t = 0; t < rows; t++) std::fill_n(y + t * WIDTH + GROUP, GROUP, 1.0f);
      c.kernels->gated(kind_, y, y + GROUP, WIDTH, rows, out, g * GROUP, GROUP);
    }
  });
}

void GluOp::run(Context& c, int, int thread, Work& work) {
  const Act out = c.wanted(out_.shared);
  work.each(thread, out.k / GROUP, 1, [&](int begin, int end) {
    for (int i = begin * GROUP; i < end * GROUP; i += GROUP)
      c.kernels->gated(kind_, gate_.data + i, up_.data + i, gate_.stride, c.step.rows(rows_), out, i, GROUP);
  });
}

void RopeTableOp::run(Context& c, int, int thread, Work& work) {
  work.each(thread, c.step.tokens, 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      float* out = out_.row(t);
      for (int i = 0; i < out_.half; i++) {
        const float angle = float(c.step.positions[t]) * frequencies_[i];
        out[i] = std::cos(angle) * factor_;
        out[out_.half + i] = std::sin(angle) * factor_;
      }
    }
  });
}

void SoftcapOp::run(Context& c, int, int thread, Work& work) {
  work.each(thread, c.step.rows(rows_), 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) c.kernels->softcap(x_.row(t), x_.width, cap_);
  });
}

void EmitOp::run(Context& c, int, int thread, Work& work) {
  const int rows = c.step.rows(rows_);
  const Act act = c.wanted(act_.shared);
  const Act& source = source_.of(rows, thread);
  float* y = c.scratch[size_t(thread)];
  work.each(thread, rows, 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      const float* x = in_.data ? in_.row(t) : source.f32 + size_t(t) * size_t(source.k);
      for (int i = 0; i < width_; i++) y[i] = x[order_ ? order_[i] : i];
      pad(y, width_, act.k);
      c.kernels->emit(act, t, 0, act.k, y);
    }
  });
}

}  // namespace octavo
