// AMX tiles: eight registers of up to 16 rows x 64 bytes. Needs amx-tile, amx-int8, amx-bf16 and
// the kernel's permission (runtime/cpu.cpp). Written as assembly: a tile register is part of an
// instruction.
//
// A product takes a cycle per row of its left operand, but ten at least, so shapes follow the
// tokens there are.

struct __attribute__((packed)) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int tile_rows, int row_bytes) {
    rows[tile] = (uint8_t)tile_rows, bytes[tile] = (uint16_t)row_bytes;
  }
};

INLINE void tile_configure(const TileShapes& s) {
  asm volatile("ldtilecfg %0" ::"m"(s) : "memory");
}
INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int T> INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> INLINE void tile_load(const void* p, size_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T> INLINE void tile_store(void* p, size_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// C += A x B, A with signed bytes, B with signed or unsigned ones
template <int C, int A, int B, bool SIGNED> INLINE void tile_dot() {
  if (SIGNED) asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  else asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B> INLINE void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
