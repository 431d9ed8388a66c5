#include <algorithm>
#include <cmath>
#include <cstring>

#include "greedy_head.h"
#include "logits.h"
#include "ops.h"
#include "pack.h"

namespace octavo {
namespace {


// Zeroes a row's tail so that kernels may work on whole groups.
void pad(float* x, int n, int to) { for (int i = n; i < to; i++) x[i] = 0; }

// Rows of a step in blocks that pass all panels. Small steps are one, whose panels the threads
// divide. Larger ones have one a thread if they can be divided so, which then reads what it wrote
// itself: lines come slowly from other cores.
class Blocks {
 public:
  Blocks(const Context& c, int rows, int threads) : rows_(rows), size_(rows) {
    const int count = std::min(rows / LEAST, threads), own = each_of(threads);
    if (rows >= threads * c.kernels->block_rows && 4 * own * threads <= 5 * rows) size_ = own;
    else if (count > 1) size_ = each_of(count);
  }

  // f(first row, rows, begin, end) over every block's items.
  template <class F> void each(Work& work, int thread, int items, int chunk, F&& f) const {
    const int count = (rows_ + size_ - 1) / size_;
    work.each(thread, count * items, chunk, [&](int begin, int end) {
      for (int next; begin < end; begin = next) {
        const int block = begin / items, base = block * items, first = block * size_;
        next = std::min(end, base + items);
        f(first, std::min(size_, rows_ - first), begin - base, next - base);
      }
    });
  }

 private:
  static constexpr int LEAST = 64;  // rows of blocks whose panels several threads divide
  int each_of(int blocks) const {
    return int(align_up(size_t(rows_ + blocks - 1) / size_t(blocks), ROW_TILE));
  }
  int rows_, size_;
};

// The second half of adapters: adds B A x to panels [from, to) of a matrix's result for rows
// [first, first + rows), the first of which lies at out.
void add_adapters(const Context& c, int part, int matrix, int first, int rows, int from, int to,
    float* out, int stride) {
  for (const AdapterRun& run : c.runs) {
    const LowRank* lr = run.adapter->find(matrix);
    if (!lr) continue;
    const uint8_t* b =
        lr->b + size_t(from) * PANEL * size_t(lr->rank) * Adapter::element(lr->format);
    for (int t = std::max(run.first, first); t < std::min(run.first + run.count, first + rows); t++)
      c.kernels->add_low_rank[lr->format == BF16](
          b, lr->rank, c.projected(part, t), to - from, out + size_t(t - first) * size_t(stride));
  }
}

}  // namespace

void LinearOp::fetch(int thread, const Work& work) const {
  int total = 0;
  for (const LinearPart& p : parts_) total += p.weight->panel_count();
  int begin = work.first(thread, total);
  for (const LinearPart& p : parts_) {
    if (begin < p.weight->panel_count()) return p.weight->fetch(begin);
    begin -= p.weight->panel_count();
  }
}

void GatedOp::fetch(int thread, const Work& work) const {
  const int begin = 2 * work.first(thread, (gate_.weight->panel_count() + 1) / 2);
  gate_.weight->fetch(begin);
  if (up_.weight) up_.weight->fetch(begin);
}

void EmbedOp::run(Context& c, int, int thread, Work& work) {
  work.each(thread, c.step.tokens, 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      const int32_t* from = index_ == Index::ids ? c.step.ids
          : index_ == Index::positions           ? c.step.positions
                                                 : c.step.token_type_ids;
      const int id = (from ? from[t] : 0) + offset_;
      float* out = out_.row(t);
      if (const float* given = replaceable_ ? c.step.embedding(t) : nullptr) {
        memcpy(out, given, size_t(out_.width) * sizeof(float));
      } else {
        table_->read_row(size_t(id), out, c.rooms[size_t(thread)]);
        for (int i = 0; i < out_.width; i++) out[i] *= scale_;
      }
      pad(out, out_.width, out_.stride);
    }
  });
}

void InjectOp::run(Context& c, int, int thread, Work& work) {
  work.each(thread, c.step.tokens, 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      const float *x = in_.row(t), *given = c.step.embedded ? c.step.embedding(t) : nullptr;
      float* out = out_.row(t);
      if (in_.data != out_.data) memcpy(out, x, size_t(out_.stride) * sizeof(float));
      for (int i = 0; given && i < out_.width; i++) out[i] = x[i] + given[first_ + i];
    }
  });
}

void SelectOp::run(Context& c, int, int thread, Work& work) {
  const Act act = c.wanted(act_.shared);
  work.each(thread, c.step.selected, 1, [&](int begin, int end) {
    for (int i = begin; i < end; i++) {
      memcpy(out_.row(i), in_.row(c.step.logits_indices[i]), size_t(in_.stride) * sizeof(float));
      if (act.k) c.kernels->emit(act, i, out_.row(i));
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
        for (int i = 0; i < in_.width; i++)
          out[i] = residual_.data ? residual_.row(t)[i] + y[i] : y[i];
      }
      if (act.k) c.kernels->emit(act, t, y);
    }
  });
}

// The sum of n values in eight chains: in one, each addition would wait for the one before it.
template <class F> static double chained_sum(int n, F&& at) {
  double sums[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8)
    for (int c = 0; c < 8; c++) sums[c] += at(i + c);
  for (; i < n; i++) sums[0] += at(i);
  for (int c = 1; c < 8; c++) sums[0] += sums[c];
  return sums[0];
}

void LayerNormOp::run(Context& c, int, int thread, Work& work) {
  const Act act = c.wanted(act_.shared);
  const int n = in_.width;
  work.each(thread, c.step.rows(rows_), 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      const float* x = in_.row(t);
      float* y = out_.row(t);
      const double mean = chained_sum(n, [&](int i) { return double(x[i]); }) / n;
      const double variance = chained_sum(n, [&](int i) {
        return (double(x[i]) - mean) * (double(x[i]) - mean);
      }) / n;
      const double scale = 1 / std::sqrt(variance + double(eps_));
      for (int i = 0; i < n; i++)
        y[i] = float((double(x[i]) - mean) * scale) * weight_[i] + bias_[i];
      pad(y, n, out_.stride);
      if (act.k) c.kernels->emit(act, t, y);
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
      rows.k = act.k, rows.remainder = act.remainder;
      rows.bf16 = act.bf16 + size_t(run.first) * bf16_stride(act);
      rows.f32 = act.f32 + size_t(run.first) * size_t(act.k);
      float* out = c.projected(i % parts, run.first);
      const LinearArgs args{
          lr->a, lr->panel_bytes, lr->inputs, rows, run.count, out, MAX_RANK, nullptr, nullptr};
      c.kernels->linear[lr->format](args, 0, (lr->rank + PANEL - 1) / PANEL);
      for (int t = 0; t < run.count; t++)
        for (int r = 0; r < lr->rank; r++) out[t * MAX_RANK + r] *= lr->scale;
    }
  });
}

std::string LinearOp::name(int) const {
  size_t out = 0;
  for (const LinearPart& p : parts_) out += p.weight->rows;
  return "linear " + std::to_string(parts_[0].weight->cols) + "->" + std::to_string(out);
}

Cost LinearOp::cost(const Context& c, int) const {
  Cost out;
  for (const LinearPart& p : parts_) out += p.weight->cost(act_.shared, c.step.rows(rows_));
  return out;
}

void LinearOp::run(Context& c, int, int thread, Work& work) {
  const int rows = c.step.rows(rows_);
  if (!rows) return;
  const Act& act = act_.of(rows, thread);
  if (rows_ == Rows::selected && parts_[0].out.data == c.head)
    return run_head(c, rows, act, thread, work);
  int total = 0;
  for (const LinearPart& p : parts_) total += p.weight->panel_count();
  Blocks(c, rows, work.members())
      .each(work, thread, total, linear_chunk(parts_[0].weight->panel_bytes),
          [&](int first, int count, int begin, int end) {
            const Act in = from_row(act, first);
            int base = 0, part = 0;
            for (const LinearPart& p : parts_) {
              const int panels = p.weight->panel_count(), from = std::max(begin - base, 0),
                        to = std::min(end - base, panels);
              if (from < to) {
                float* out = p.out.row(first);
                const float* residual = p.residual ? p.residual + (out - p.out.data) : nullptr;
                p.weight->multiply(*c.kernels,
                    p.weight->args(in, count, out, p.out.stride, p.bias, residual), from, to,
                    c.rooms[size_t(thread)]);
                if (rows_ == Rows::tokens)
                  add_adapters(c, part, p.weight->id, first, count, from, to, out + from * PANEL,
                      p.out.stride);
              }
              base += panels, part++;
            }
          });
}

// Logits, and the statistics of their sets while they are in the core's cache. Of panels that no
// token may be drawn from, neither.
void LinearOp::run_head(Context& c, int rows, const Act& act, int thread, Work& work) const {
  if (c.greedy_head) return c.greedy_head->run(c, rows, act, thread, work);
  const LinearPart& p = parts_[0];
  const int panels = p.weight->panel_count(), sets = set_count(panels * PANEL);
  const LinearArgs args = p.weight->args(act, rows, p.out.data, p.out.stride, p.bias, p.residual);
  uint8_t* room = c.rooms[size_t(thread)];
  work.each(thread, sets, 1, [&](int begin, int end) {
    for (int set = begin; set < end; set++) {
      const int from = set * SET_PANELS, to = std::min(from + SET_PANELS, panels);
      if (c.live.empty()) p.weight->multiply(*c.kernels, args, from, to, room);
      else
        for (int i = from; i < to; i++)
          if (c.live[size_t(i)]) p.weight->multiply(*c.kernels, args, i, i + 1, room);
      if (!c.measured) continue;
      for (int t = 0; t < rows; t++)
        Logits(*c.kernels, p.out.row(t), p.out.width, c.statistics_of(t))
            .measure(set, c.inverses[size_t(t)]);
    }
  });
}

Cost GatedOp::cost(const Context& c, int phase) const {
  Cost out;
  if (phase) return out;
  for (const LinearPart* p : {&gate_, &up_})
    if (p->weight) out += p->weight->cost(in_.shared, c.step.rows(rows_));
  return out;
}

void GatedOp::run(Context& c, int phase, int thread, Work& work) {
  const int rows = c.step.rows(rows_);
  if (!rows) return;
  if (phase == 0) return project(c, rows, thread, work);
  const Act act = c.wanted(out_.of(rows, thread));
  each_row(out_, rows, thread, work, [&](int begin, int end) {
    for (int t = begin; t < end; t++) c.kernels->emit(act, t, mid_.row(t));
  });
}

void GatedOp::project(Context& c, int rows, int thread, Work& work) const {
  const Act& act = in_.of(rows, thread);
  const int panels = gate_.weight->panel_count();
  float *gate = c.scratch[size_t(thread)], *up = gate + PAIR;
  auto project = [&](const LinearPart& p, int part, const Act& in, int first, int rows, int from,
                     int to, float* out) {
    const LinearArgs args =
        p.weight->args(in, rows, out, WIDTH, p.bias ? p.bias + from * PANEL : nullptr);
    p.weight->multiply(*c.kernels, args, 0, to - from, c.rooms[size_t(thread)], from);
    if (rows_ == Rows::tokens)
      add_adapters(c, part, p.weight->id, first, rows, from, to, out, WIDTH);
  };
  auto gated = [&](const Act& in, int first, int count, int from) {
    const int to = std::min(from + PAIR / PANEL, panels), width = (to - from) * PANEL;
    project(gate_, 0, in, first, count, from, to, gate);
    if (up_.weight)
      project(up_, 1, in, first, count, from, to, up);
    else
      for (int t = 0; t < count; t++) std::fill_n(up + t * WIDTH, width, 1.0f);
    c.kernels->gated(kind_, gate, up, WIDTH, count, mid_.row(first) + from * PANEL, mid_.stride,
        width);
    if (to == panels)
      for (int t = first; t < first + count; t++) pad(mid_.row(t), mid_.width, out_.shared.k);
  };
  Blocks(c, rows, work.members())
      .each(work, thread, (panels + 1) / 2, 1, [&](int first, int count, int begin, int end) {
        const Act in = from_row(act, first);
        for (int pair = begin; pair < end; pair++) gated(in, first, count, 2 * pair);
      });
}

void GluOp::run(Context& c, int, int thread, Work& work) {
  const int rows = c.step.rows(rows_);
  const Act out = c.wanted(out_.of(rows, thread));
  float* y = c.scratch[size_t(thread)];
  each_row(out_, rows, thread, work, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      c.kernels->gated(kind_, gate_.row(t), up_.row(t), 0, 1, y, 0, out.k);
      pad(y, gate_.width, out.k);
      c.kernels->emit(out, t, y);
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
      c.kernels->emit(act, t, y);
    }
  });
}

}  // namespace octavo
