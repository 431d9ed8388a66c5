// Mixtures of experts: which rows go to which experts, and the experts' feed-forward blocks on just
// those rows.
#pragma once
#include "act.h"
#include "ops.h"

namespace octavo {

// Softmax over a row's experts; all but the `top` largest become 0, the first of equals first.
class RouteOp : public Op {
 public:
  RouteOp(Buffer in, Buffer out, int top, bool normalize)
      : in_(in),
        out_(out),
        top_(top),
        normalize_(normalize) {}
  std::string name(int) const override { return "route"; }
  size_t scratch_floats(int) const override { return align_up(size_t(in_.width), 16); }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  Buffer in_, out_; int top_; bool normalize_;
};

// Room for a step's rows, each once for every expert it goes to, sorted by expert; layers of one
// shape share it.
struct ExpertRows {
  int capacity = 0;              // rows: those of an expert begin at a multiple of ROW_TILE
  Act in, mid;                   // gathered inputs, and what lies between the projections
  Buffer gated;                  // the latter as floats
  Buffer out;                    // results, before they are weighted
  std::vector<int> begin, count; // by expert
  std::vector<int> active;       // experts that have rows
  std::vector<int> token;        // by row: where it came from, -1 for padding
  // by token, its rows' place in `row` and `weight`; one more at the end
  std::vector<int> first;
  std::vector<int> row;
  std::vector<float> weight;

  static int rows(int tokens, int experts, int top) {
    const int pairs = tokens * top;
    return int(
        align_up(size_t(pairs + (ROW_TILE - 1) * (experts < pairs ? experts : pairs)), ROW_TILE));
  }
  void plan(const Buffer& routes, int tokens, int experts);
};

std::unique_ptr<ExpertRows> allocate_expert_rows(
    Arena& arena, int tokens, int experts, int top, int hidden, int ffn, ActForms in, ActForms mid);

struct Expert {
  struct Part { const Matrix* weight; const float* bias; };  // null: none
  Part gate, up, down;
};

// out = residual + sum over a row's experts, in ascending order, of weight * down(activation(gate
// x) * up x). Phase 0 sorts rows by expert, 1 gathers them, 2 gates, 3 emits, 4 projects back, 5
// sums.
class ExpertsOp : public Op {
 public:
  ExpertsOp(Buffer x, Buffer routes, std::vector<Expert> experts, int kind, ExpertRows& rows,
      Buffer out, Buffer residual)
      : x_(x),
        routes_(routes),
        experts_(std::move(experts)),
        kind_(kind),
        rows_(rows),
        out_(out),
        residual_(residual) {}
  std::string name(int phase) const override;
  int phases() const override { return 6; }
  Cost cost(const Context& c, int phase) const override;
  size_t scratch_floats(int rows) const override {
    return std::max(size_t(rows_.in.k), size_t(rows) * WIDTH);
  }
  void run(Context& c, int phase, int thread, Work& work) override;
 private:
  static constexpr int WIDTH = 2 * PANEL;  // scratch floats a row: gates, then ups
  void gather(Context& c, int row, float* line) const;
  void gate(Context& c, int expert, int panel, int thread) const;
  void emit(Context& c, int row) const;
  void sum(int token) const;
  Buffer x_, routes_;
  std::vector<Expert> experts_;
  int kind_;
  ExpertRows& rows_;
  Buffer out_, residual_;
};

}  // namespace octavo
