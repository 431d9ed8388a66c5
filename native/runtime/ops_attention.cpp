#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention.h"
#include "pack.h"

namespace octavo {
namespace {

// spans this short divide their keys among threads instead of their queries
constexpr int SPLIT_TOKENS = 4;

// The keys that token t of a span sees: [first, last]. Without causality a window reaches to both
// sides.
int first_key(const Context& c, const Schedule& s, const Span& span, int t) {
  if (s.segmented) return span.position + c.segment_first[size_t(span.first + t)];
  return s.window ? std::max(0, span.position + t - s.window + 1) : 0;
}

int last_key(const Context& c, const Schedule& s, const Span& span, int t) {
  const int reach = s.segmented ? c.segment_last[size_t(span.first + t)]
      : s.causal                ? t + (c.step.reach ? c.step.reach[span.first + t] : 0)
      : s.window                ? std::min(t + s.window, span.count) - 1
                                : span.count - 1;
  return span.position + reach;
}

// Leaves out items of which no row is selected.
void keep_selected(const Context& c, Schedule& s) {
  std::vector<bool> wanted(size_t(c.step.tokens), false);
  for (int i = 0; i < c.step.selected; i++) wanted[size_t(c.step.logits_indices[i])] = true;
  s.partial = std::find(wanted.begin(), wanted.end(), false) != wanted.end();
  std::erase_if(s.items, [&](const AttendItem& item) {
    const auto span = wanted.begin() + c.step.spans[size_t(item.span)].first,
               first = span + item.row / s.group,
               last = span + (item.row + item.rows - 1) / s.group;
    return std::find(first, last + 1, true) == last + 1;
  });
}

}  // namespace

void plan_attention(const Context& c, Schedule& s) {
  const int group = s.group;
  s.items.clear();
  s.part_begin.assign(size_t(c.step.tokens) + 1, 0);
  int part = 0, tokens_left = c.step.tokens;
  for (size_t i = 0; i < c.step.spans.size(); i++) {
    const Span& span = c.step.spans[i];
    size_t count = 0;
    for (int row = 0; row < span.count * group; count++) {
      const int rows = std::min(ATTEND_ROWS, span.count * group - row);
      const int last = (row + rows - 1) / group;
      const int newest = last_key(c, s, span, last);
      const int begin = first_key(c, s, span, row / group) / KV_CHUNK, end = newest / KV_CHUNK + 1;
      s.items.push_back({int(i), row, rows, newest + 1, begin, end, -1});
      row += rows;
    }
    // Splitting keys needs one partial per chunk; when they are out, one thread walks all chunks:
    // same bits. Later tokens see more: taken from both ends by turns, equal shares of the items
    // are equal work.
    const std::vector<AttendItem> ascending(
        s.items.end() - std::ptrdiff_t(count > 2 ? count : 0), s.items.end());
    for (size_t k = 0; count > 2 && k < count; k++)
      s.items[s.items.size() - count + k] = ascending[k % 2 ? count - 1 - k / 2 : k / 2];
    const int span_begin = first_key(c, s, span, 0) / KV_CHUNK,
              chunks = (span.position + span.count - 1) / KV_CHUNK + 1 - span_begin;
    const bool split = span.count <= SPLIT_TOKENS && chunks > 1 &&
        part + span.count * chunks + tokens_left <= c.part_capacity;
    if (split) {
      std::vector<AttendItem> whole;
      while (!s.items.empty() && s.items.back().span == int(i)) {
        whole.push_back(s.items.back());
        s.items.pop_back();
      }
      for (const AttendItem& w : whole)
        for (int k = span_begin; k < span_begin + chunks; k++)
          s.items.push_back({w.span, w.row, w.rows, w.keys, k, k + 1, k - span_begin});
    }
    for (int t = 0; t < span.count; t++) {
      s.part_begin[size_t(span.first + t)] = part;
      part += split ? chunks : 1;
    }
    tokens_left -= span.count;
  }
  s.part_begin[size_t(c.step.tokens)] = part;
  if (s.selected) keep_selected(c, s);
}

void RopeTableOp::run(Context& c, int, int thread, Work& work) {
  work.each(thread, c.step.tokens, 1, [&](int begin, int end) {
    const bool several = c.step.coordinates && !axes_.empty();
    for (int t = begin; t < end; t++) {
      float* out = out_.row(t);
      for (int i = 0; i < out_.half; i++) {
        const int32_t at = several
            ? c.step.coordinates[size_t(axes_[size_t(i)]) * size_t(c.step.tokens) + size_t(t)]
            : c.step.positions[t];
        const float angle = float(at) * frequencies_[i];
        out[i] = std::cos(angle) * factor_;
        out[out_.half + i] = std::sin(angle) * factor_;
      }
    }
  });
}

void AttentionOp::run(Context& c, int phase, int thread, Work& work) {
  float* tmp = c.scratch[size_t(thread)];
  if (phase == 0) {
    if (!stores_first(c)) return;
    const int rows = c.step.tokens + int(c.step.kv_writes.size());
    work.each(thread, rows * s_.kv_heads, s_.kv_heads, [&](int begin, int end) {
      const Span* span = &c.step.spans[0];
      for (int i = begin; i < end; i++) {
        const int t = i / s_.kv_heads, head = i % s_.kv_heads;
        if (t >= c.step.tokens) {
          store(c, c.step.kv_writes[size_t(t - c.step.tokens)], head, tmp);
          continue;
        }
        while (t >= span->first + span->count) span++;
        store(c, {t, span->table, span->position + t - span->first}, head, tmp);
      }
    });
  } else if (phase == 1) {
    const int units = int(c.schedules[size_t(s_.schedule)].items.size()) * s_.kv_heads;
    work.each(thread, units, 1, [&](int begin, int end) {
      for (int i = begin; i < end; i++) attend(c, i, units, tmp);
    });
  } else {
    const bool selected = c.schedules[size_t(s_.schedule)].selected;
    const int rows = c.step.rows(selected ? Rows::selected : Rows::tokens);
    each_row(s_.act, rows, thread, work, [&](int begin, int end) {
      const Act act = c.wanted(s_.act.of(rows, thread));
      for (int i = begin; i < end; i++)
        merge(c, selected ? c.step.logits_indices[i] : i, act, i, tmp);
    });
  }
}

// A span's keys are read once for all its rows.
Cost AttentionOp::cost(const Context& c, int phase) const {
  Cost out;
  if (phase != 1) return out;
  const KvLayer& kv = cache(c);
  const double key = double(kv.head_bytes) * s_.kv_heads / BLOCK;
  int span = -1, from = 0, to = 0;
  for (const AttendItem& item : c.schedules[size_t(s_.schedule)].items) {
    const int begin = item.chunk_begin * KV_CHUNK,
              end = std::max(begin, std::min(item.chunk_end * KV_CHUNK, item.keys));
    if (item.span != span) span = item.span, from = to = begin;
    const int known = to - from;
    from = std::min(from, begin), to = std::max(to, end);
    out.bytes += (to - from - known) * key;
    out.operations += 4.0 * s_.head_dim * item.rows * (end - begin) * s_.kv_heads;
  }
  return out;
}

bool AttentionOp::stores_first(const Context& c) const {
  return c.step.tokens > int(c.step.spans.size()) || !c.step.kv_writes.empty() ||
      s_.heads / s_.kv_heads > ATTEND_ROWS || c.schedules[size_t(s_.schedule)].partial;
}

// A head's row, normalised and rotated if that is asked for; `tmp` has room for two.
const float* AttentionOp::turned(
    const Context& c, Buffer from, const float* norm, int t, int head, float* tmp) const {
  const int d = s_.head_dim;
  const float* x = from.row(t) + head * d;
  if (norm) c.kernels->rms_norm(x, norm, d, s_.eps, tmp), x = tmp;
  if (s_.rope.table)
    c.kernels->rope(x, s_.rope.row(t), s_.rope.half, d, s_.interleaved, tmp + d + SLACK),
        x = tmp + d + SLACK;
  return x;
}

void AttentionOp::store(Context& c, const KvWrite& w, int kv_head, float* tmp) const {
  const KvLayer& kv = cache(c);
  const int slot = w.position % BLOCK;
  uint8_t* block = c.kv.at(kv, c.step.block_tables[w.table + w.position / BLOCK], kv_head);
  c.kernels->store_k(turned(c, s_.k, s_.k_norm, w.row, kv_head, tmp), s_.head_dim, kv.padded, slot,
      c.kv.type, block);
  c.kernels->store_v(
      s_.v.row(w.row) + kv_head * s_.head_dim, s_.head_dim, kv.padded, slot, c.kv.type, block);
}

// What unit of work `index` reads: an item and a KV head.
KeyRange AttentionOp::keys(const Context& c, int index) const {
  const AttendItem& item = c.schedules[size_t(s_.schedule)].items[size_t(index / s_.kv_heads)];
  const int32_t* blocks = c.step.block_tables + c.step.spans[size_t(item.span)].table;
  return {c.kv.at(cache(c), 0, index % s_.kv_heads), blocks, item.chunk_begin * KV_CHUNK,
      std::min(item.chunk_end * KV_CHUNK, item.keys)};
}

void AttentionOp::attend(Context& c, int index, int units, float* tmp) {
  const Schedule& s = c.schedules[size_t(s_.schedule)];
  const AttendItem& item = s.items[size_t(index / s_.kv_heads)];
  const KeyRange all = keys(c, index);
  const Span& span = c.step.spans[size_t(item.span)];
  const int kv_head = index % s_.kv_heads;
  const int group = s_.heads / s_.kv_heads, d = cache(c).padded;
  float max[ATTEND_ROWS], sum[ATTEND_ROWS];
  // after the partial outputs
  float *queries = tmp + ATTEND_ROWS * d, *spare = queries + ATTEND_ROWS * d;
  size_t slot[ATTEND_ROWS];
  if (!stores_first(c) && all.end == item.keys)
    store(c, {span.first, span.table, span.position}, kv_head, spare);
  AttendArgs a{};
  a.rows = item.rows;
  a.remainder = s_.remainder;
  a.softcap = s_.softcap;
  a.head_dim = d;
  a.block_stride = c.kv.block_bytes;
  a.fetch = span.count <= SPLIT_TOKENS;  // longer spans read the same keys again and again
  for (int r = 0; r < item.rows; r++) {
    const int t = (item.row + r) / group, head = kv_head * group + (item.row + r) % group;
    c.kernels->store_q(turned(c, s_.q, s_.q_norm, span.first + t, head, spare), s_.head_dim, d,
        s_.scale, c.kv.type, queries + r * d);
    a.q[r] = queries + r * d;
    a.first[r] = first_key(c, s, span, t), a.last[r] = last_key(c, s, span, t);
    const int part = s.part_begin[size_t(span.first + t)] + std::max(item.part, 0);
    slot[r] = size_t(part) * size_t(s_.heads) + size_t(head);
    a.max[r] = c.part_max + slot[r];
    a.sum[r] = c.part_sum + slot[r];
    a.out[r] = c.part_out + slot[r] * size_t(d);
  }
  if (all.begin >= all.end)  // a split span whose earlier tokens see nothing of this chunk
    for (int r = 0; r < item.rows; r++)
      *a.max[r] = MASKED, *a.sum[r] = 0, memset(a.out[r], 0, size_t(d) * sizeof(float));
  for (int begin = all.begin; begin < all.end; begin += KV_CHUNK) {
    a.keys = a.next = all;
    a.keys.begin = begin, a.keys.end = a.next.begin = std::min(begin + KV_CHUNK, all.end);
    if (a.next.begin == all.end) a.next = index + 1 < units ? keys(c, index + 1) : KeyRange{};
    // the first chunk goes where the result belongs, later ones are folded in
    c.kernels->attend[c.kv.type](a);
    if (begin > all.begin)
      for (int r = 0; r < item.rows; r++)
        c.kernels->merge(&c.part_max[slot[r]], &c.part_sum[slot[r]],
            c.part_out + slot[r] * size_t(d), max[r], sum[r], a.out[r], d);
    for (int r = 0; r < item.rows; r++)
      a.max[r] = max + r, a.sum[r] = sum + r, a.out[r] = tmp + r * d;
  }
}

// Token t's result, as row `out` of what linear layers read.
void AttentionOp::merge(Context& c, int t, const Act& act, int out, float* row) {
  const Schedule& s = c.schedules[size_t(s_.schedule)];
  const int d = cache(c).padded, first = s.part_begin[size_t(t)],
            count = s.part_begin[size_t(t) + 1] - first;
  for (int head = 0; head < s_.heads; head++) {
    const size_t slot = size_t(first) * size_t(s_.heads) + size_t(head);
    c.kernels->combine(c.part_max + slot, c.part_sum + slot, c.part_out + slot * size_t(d), count,
        s_.heads, d, s_.head_dim, s_.sinks ? s_.sinks + head : nullptr, row + head * s_.head_dim);
  }
  for (int i = s_.heads * s_.head_dim; i < act.k; i++) row[i] = 0;
  c.kernels->emit(act, out, row);
}

}  // namespace octavo
