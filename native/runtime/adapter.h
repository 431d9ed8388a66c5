// Low-rank adapters (LoRA, Hu et al., 2021): y = W x + scale * B A x, for the rows of some
// sequences.
#pragma once
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "pack.h"

namespace octavo {

constexpr int MAX_RANK = 256;
constexpr int ADAPTED_PARTS = 3;  // matrices that share an input: queries, keys, values

struct LowRank {
  Format format;        // of both factors: F32 or BF16
  const uint8_t* a;     // [rank][inputs] as panels
  size_t panel_bytes;
  int rank, inputs;
  const uint8_t* b;     // [panels of 16 outputs][rank][16]
  float scale;
};

class Adapter {
 public:
  struct Part {
    int matrix, type;
    const uint8_t *a, *b;
    int rank;
    size_t inputs, outputs;
    float scale;
  };

  explicit Adapter(const std::vector<Part>& parts) : arena_(bytes(parts)) {
    for (const Part& p : parts) {
      const Format format = panel_format(p.type);
      const size_t panels = size_t(p.rank + PANEL - 1) / PANEL,
                   each = panel_bytes(format, 0, p.inputs);
      uint8_t* a = arena_.allocate<uint8_t>(panels * each);
      for (size_t i = 0; i < panels; i++)
        pack_panel({p.type, 0}, p.a, size_t(p.rank), p.inputs, i, a + i * each);
      const size_t size = size_t(p.rank) * align_up(p.outputs, PANEL) * element(format);
      uint8_t* b = arena_.allocate<uint8_t>(size);
      memcpy(b, p.b, size);
      parts_[p.matrix] = {format, a, each, p.rank, int(padded_cols(p.inputs)), b, p.scale};
    }
  }

  bool reads(Format format) const {
    for (const auto& [matrix, part] : parts_) if (part.format == format) return true;
    return false;
  }

  const LowRank* find(int matrix) const {
    auto it = parts_.find(matrix);
    return it == parts_.end() ? nullptr : &it->second;
  }

  static size_t element(Format format) { return format == F32 ? 4 : 2; }

  static size_t bytes(const std::vector<Part>& parts) {
    size_t total = 0;
    for (const Part& p : parts) {
      const Format format = panel_format(p.type);
      total += align_up(size_t(p.rank + PANEL - 1) / PANEL * panel_bytes(format, 0, p.inputs), 64);
      total += align_up(size_t(p.rank) * align_up(p.outputs, PANEL) * element(format), 64);
    }
    return total;
  }

 private:
  Arena arena_;
  std::unordered_map<int, LowRank> parts_;
};

struct AdapterRun { const Adapter* adapter; int first, count; };  // rows of one sequence

}  // namespace octavo
