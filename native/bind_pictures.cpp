// Pictures: from Pillow's memory, resized, and cut into an encoder's rows.
#include "runtime/pictures.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>

#include "runtime/cpu.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace octavo;

namespace {

using Pixels = nb::ndarray<const uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// As https://arrow.apache.org/docs/format/CDataInterface.html has it, for good.
struct ArrowArray {
  int64_t length, null_count, offset, n_buffers, n_children;
  const void** buffers;
  ArrowArray **children, *dictionary;
  void (*release)(ArrowArray*);
  void* private_data;
};

nb::ndarray<nb::numpy, uint8_t, nb::ndim<3>> new_pixels(size_t height, size_t width) {
  auto* data = new uint8_t[3 * height * width];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
  return {data, {height, width, 3}, owner};
}

// The pixels of pictures of one width, one below the other, each given as Pillow gives it to other
// libraries: a capsule of an array of four bytes a pixel.
auto rgb_pixels(const std::vector<nb::capsule>& parts, size_t width) {
  std::vector<std::pair<const uint8_t*, size_t>> found;
  size_t pixels = 0;
  for (const nb::capsule& part : parts) {
    const auto* a = static_cast<const ArrowArray*>(part.data("arrow_array"));
    if (!a || !a->release || a->offset || a->n_children != 1 || a->children[0]->offset ||
        a->children[0]->length != 4 * a->length || a->children[0]->n_buffers != 2)
      throw std::invalid_argument("no array of pixels");
    found.emplace_back(static_cast<const uint8_t*>(a->children[0]->buffers[1]), a->length);
    pixels += size_t(a->length);
  }
  if (!width || pixels % width) throw std::invalid_argument("shapes disagree");
  auto result = new_pixels(pixels / width, width);
  nb::gil_scoped_release release;
  uint8_t* out = result.data();
  for (const auto& [data, count] : found) pack_pixels(data, count, out), out += 3 * count;
  return result;
}

// RGB to RGB of another height and width.
auto resize_picture(
    const std::string& isa, Pixels pixels, size_t height, size_t width, int filter) {
  if (pixels.shape(2) != 3) throw std::invalid_argument("pixels are not RGB");
  auto result = new_pixels(height, width);
  nb::gil_scoped_release release;
  resize(*select_kernels(isa), pixels.data(), {pixels.shape(0), pixels.shape(1)}, result.data(),
      {height, width}, Filter(filter));
  return result;
}

// Rows of an encoder, as Patches says. pixels: [lines of all pictures, width, 3].
auto cut_patches(
    Pixels pixels, Ints first, int side, int frames, size_t apart, Values values) {
  const size_t width = pixels.shape(1), most = pixels.shape(0) * width;
  if (pixels.shape(2) != 3 || values.shape(0) != 3 || values.shape(1) != 256 || frames < 1 ||
      side < 1 || size_t(side) > width)
    throw std::invalid_argument("shapes disagree");
  const size_t behind = (size_t(frames - 1) * apart + size_t(side - 1)) * width + size_t(side);
  for (size_t i = 0; i < first.size(); i++)
    if (first(i) >= 0 && size_t(first(i)) + behind > most)
      throw std::invalid_argument("a patch outside its picture");
  const size_t count = first.size(), row = 3 * size_t(frames) * size_t(side) * size_t(side);
  auto* out = new float[count * row];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  nb::ndarray<nb::numpy, float, nb::ndim<2>> result(out, {count, row}, owner);
  nb::gil_scoped_release release;
  cut({pixels.data(), width, apart, frames, side, values.data()}, first.data(), count, out);
  return result;
}

}  // namespace

void bind_pictures(nb::module_& m) {
  m.def("rgb_pixels", &rgb_pixels, "parts"_a, "width"_a);
  m.def("resize_picture", &resize_picture, "isa"_a, "pixels"_a, "height"_a, "width"_a, "filter"_a);
  m.def("cut_patches", &cut_patches, "pixels"_a, "first"_a, "side"_a, "frames"_a, "apart"_a,
      "values"_a);
}
