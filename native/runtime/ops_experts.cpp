#include "experts.h"

#include <algorithm>
#include <cstring>

namespace octavo {
void RouteOp::run(Context& c, int, int thread, Work& work) {
  work.each(thread, c.step.tokens, 1, [&](int begin, int end) {
    for (int t = begin; t < end; t++) {
      const float* x = in_.row(t);
      float *y = out_.row(t), *p = c.scratch[size_t(thread)], sum = 0, kept = 0;
      const int n = in_.width;
      const float top = *std::max_element(x, x + n);
      const int padded = int(align_up(size_t(n), 16));
      memcpy(p, x, size_t(n) * sizeof(float));
      std::fill(p + n, p + padded, MASKED);
      sum = float(c.kernels->exp_sum(p, padded, top, 1, p));
      memset(y, 0, size_t(out_.stride) * sizeof(float));
      for (int k = 0; k < top_; k++) {
        int best = -1;
        for (int i = 0; i < n; i++) if (y[i] == 0 && (best < 0 || p[i] > p[best])) best = i;
        y[best] = p[best] / sum;
        kept += y[best];
      }
      for (int i = 0; i < n && normalize_; i++) y[i] /= kept;
    }
  });
}

void ExpertRows::plan(const Buffer& routes, int tokens, int experts) {
  count.assign(size_t(experts), 0), begin.assign(size_t(experts), 0);
  active.clear(), row.clear(), weight.clear(), first.assign(1, 0);
  for (int t = 0; t < tokens; t++)
    for (int e = 0; e < experts; e++) count[size_t(e)] += routes.row(t)[e] > 0;
  int next = 0;
  for (int e = 0; e < experts; e++) {
    begin[size_t(e)] = next;
    next += int(align_up(size_t(count[size_t(e)]), ROW_TILE));
    if (count[size_t(e)]) active.push_back(e);
  }
  token.assign(size_t(next), -1);
  std::vector<int> used(size_t(experts), 0);
  for (int t = 0; t < tokens; t++) {
    for (int e = 0; e < experts; e++) {
      const float w = routes.row(t)[e];
      if (!(w > 0)) continue;
      const int r = begin[size_t(e)] + used[size_t(e)]++;
      token[size_t(r)] = t, row.push_back(r), weight.push_back(w);
    }
    first.push_back(int(row.size()));
  }
}

std::unique_ptr<ExpertRows> allocate_expert_rows(Arena& arena, int tokens, int experts, int top,
    int hidden, int ffn, ActForms in, ActForms mid) {
  auto r = std::make_unique<ExpertRows>();
  r->capacity = ExpertRows::rows(tokens, experts, top);
  r->in = allocate_act(arena, r->capacity, hidden, in);
  r->mid = allocate_act(arena, r->capacity, ffn, mid);
  auto buffer = [&](int width) {
    return Buffer{arena.allocate<float>(size_t(r->capacity) * row_stride(width) + SLACK), width,
        int(row_stride(width))};
  };
  r->gated = buffer(ffn);
  r->out = buffer(hidden);
  return r;
}

std::string ExpertsOp::name(int phase) const {
  const char* names[] = {"experts: sort", "experts: gather", "experts: gated", "experts: emit",
      "experts: linear", "experts: sum"};
  return names[phase];
}

void ExpertsOp::gather(Context& c, int row, float* line) const {
  const int t = rows_.token[size_t(row)];
  if (t < 0) return;
  memset(line, 0, size_t(rows_.in.k) * sizeof(float));
  memcpy(line, x_.row(t), size_t(x_.width) * sizeof(float));
  c.kernels->emit(rows_.in, row, line);
}

void ExpertsOp::gate(Context& c, int expert, int panel, int thread) const {
  float* y = c.scratch[size_t(thread)];
  const Expert& e = experts_[size_t(expert)];
  const int begin = rows_.begin[size_t(expert)], rows = rows_.count[size_t(expert)];
  const Act in = from_row(rows_.in, begin);
  for (const Expert::Part* p : {&e.gate, &e.up}) {
    const float* bias = p->bias ? p->bias + panel * PANEL : nullptr;
    const LinearArgs args =
        p->weight->args(in, rows, p == &e.gate ? y : y + PANEL, WIDTH, bias);
    p->weight->multiply(*c.kernels, args, 0, 1, c.rooms[size_t(thread)], panel);
  }
  c.kernels->gated(kind_, y, y + PANEL, WIDTH, rows,
      rows_.gated.row(begin) + panel * PANEL, rows_.gated.stride, PANEL);
}

void ExpertsOp::emit(Context& c, int row) const {
  float* x = rows_.gated.row(row);
  std::fill(x + rows_.gated.width, x + rows_.mid.k, 0.0f);
  c.kernels->emit(rows_.mid, row, x);
}

void ExpertsOp::sum(int t) const {
  float* out = out_.row(t);
  const int n = out_.width;
  const float* before = residual_.data ? residual_.row(t) : nullptr;
  for (int i = 0; i < n; i++) {
    float s = 0;
    for (int a = rows_.first[size_t(t)]; a < rows_.first[size_t(t) + 1]; a++)
      s += rows_.weight[size_t(a)] * rows_.out.row(rows_.row[size_t(a)])[i];
    out[i] = before ? before[i] + s : s;
  }
}

Cost ExpertsOp::cost(const Context&, int phase) const {
  Cost out;
  for (int e : rows_.active) {
    const Expert& expert = experts_[size_t(e)];
    const int rows = rows_.count[size_t(e)];
    if (phase == 2)
      for (const Expert::Part* p : {&expert.gate, &expert.up})
        out += p->weight->cost(rows_.in, rows);
    if (phase == 4) out += expert.down.weight->cost(rows_.mid, rows);
  }
  return out;
}

void ExpertsOp::run(Context& c, int phase, int thread, Work& work) {
  const auto& active = rows_.active;
  if (phase == 0) {
    work.each(thread, 1, 1, [&](int, int) {
      rows_.plan(routes_, c.step.tokens, int(experts_.size()));
      for (int e : active)
        for (const Expert::Part* p :
            {&experts_[size_t(e)].gate, &experts_[size_t(e)].up, &experts_[size_t(e)].down})
          c.expert_bytes += size_t(p->weight->panel_count()) * p->weight->panel_bytes;
    });
  } else if (phase == 1) {
    work.each(thread, int(rows_.token.size()), 1, [&](int begin, int end) {
      for (int r = begin; r < end; r++) gather(c, r, c.scratch[size_t(thread)]);
    });
  } else if (phase == 2) {
    const int panels = experts_[0].gate.weight->panel_count();
    work.each(thread, int(active.size()) * panels, 1, [&](int begin, int end) {
      for (int i = begin; i < end; i++) gate(c, active[size_t(i / panels)], i % panels, thread);
    });
  } else if (phase == 3) {
    work.each(thread, int(rows_.token.size()), 1, [&](int begin, int end) {
      for (int r = begin; r < end; r++) if (rows_.token[size_t(r)] >= 0) emit(c, r);
    });
  } else if (phase == 4) {
    const int panels = experts_[0].down.weight->panel_count(),
              chunk = linear_chunk(experts_[0].down.weight->panel_bytes),
              chunks = (panels + chunk - 1) / chunk;
    work.each(thread, int(active.size()) * chunks, 1, [&](int begin, int end) {
      for (int i = begin; i < end; i++) {
        const int e = active[size_t(i / chunks)], from = i % chunks * chunk,
                  first = rows_.begin[size_t(e)];
        const Matrix& m = *experts_[size_t(e)].down.weight;
        const LinearArgs args = m.args(from_row(rows_.mid, first), rows_.count[size_t(e)],
            rows_.out.row(first), rows_.out.stride, experts_[size_t(e)].down.bias);
        m.multiply(*c.kernels, args, from, std::min(panels, from + chunk), c.rooms[size_t(thread)]);
      }
    });
  } else {
    work.each(thread, c.step.tokens, 1, [&](int begin, int end) {
      for (int t = begin; t < end; t++) sum(t);
    });
  }
}

}  // namespace octavo
