// The images of a convolution, as its patches are read: where the elements of a kernel stand, and frames of zeros around
// images.
//
// Letters as in native_convolution.h.
#ifndef DPTRAIN_NATIVE_PATCHES_H
#define DPTRAIN_NATIVE_PATCHES_H

namespace {
// Elements of an image, or of several, in their frame: what the second cache holds beside the kernel's lines.
const int64_t dp_FRAME = 1 << 16;

// An element of the kernel: how far from a pixel's place it reads, in rows and columns, and its matrix of channels.
template <class T> struct dp_Tap {
    int64_t row, column;
    const T *matrix;
};

// Images (B, H, W, C) that are read at places p * sh, q * sw plus taps; P x Q places.
template <class T> struct dp_Patches {
    int64_t B, H, W, C, P, Q, sh, sw;
    const T *images;
    std::vector<dp_Tap<T>> taps;

    // The least and the greatest row and column of the taps, and the columns of a frame, or of the image where it needs none.
    int64_t top = 0, bottom = 0, left = 0, right = 0, columns = 0;
    bool framed = false;

    void measure() {
        top = bottom = taps[0].row, left = right = taps[0].column;
        for (const dp_Tap<T> &tap : taps) {
            top = std::min(top, tap.row), bottom = std::max(bottom, tap.row);
            left = std::min(left, tap.column), right = std::max(right, tap.column);
        }
        framed = top < 0 || left < 0 || (P - 1) * sh + bottom >= H || (Q - 1) * sw + right >= W;
        columns = framed ? (Q - 1) * sw + right - left + 1 : W;
    }

    int64_t depth() const { return (int64_t)taps.size() * C; }
    // Lines of a frame of so many rows of the result, and elements from one image to the next.
    int64_t lines(int64_t rows) const { return (rows - 1) * sh + bottom - top + 1; }
    int64_t pitch(int64_t rows) const { return (framed ? lines(rows) * columns : H * W) * C; }
    // Rows of the result that fit into a frame, at least one; images of so many rows.
    int64_t fitting() const {
        return std::max((int64_t)1, std::min(P, (dp_FRAME / (columns * C) - bottom + top - 1) / sh + 1));
    }
    int64_t together(int64_t rows) const { return std::max((int64_t)1, dp_FRAME / std::max(pitch(rows), (int64_t)1)); }

    // Where images b to b1 stand that places from row p to p1 meet: the first place's own pixel, tap (0, 0).
    const T *stand(int64_t b, int64_t b1, int64_t p, int64_t p1) const {
        if (!framed) return images + (b * H + p * sh) * W * C;
        T *const frame = dp_scratch<T, 4>((b1 - b) * pitch(p1 - p)), *to = frame;
        // Columns of the image within the frame.
        const int64_t low = std::min(std::max(-left, (int64_t)0), columns), high = std::max(low, std::min(W - left, columns));
        for (; b < b1; ++b)
            for (int64_t h = p * sh + top; h <= (p1 - 1) * sh + bottom; ++h, to += columns * C) {
                if (h < 0 || h >= H) {
                    std::fill(to, to + columns * C, (T)0);
                    continue;
                }
                const T *const of = images + (b * H + h) * W * C;
                std::fill(to, to + low * C, (T)0);
                std::copy(of + (low + left) * C, of + (high + left) * C, to + low * C);
                std::fill(to + high * C, to + columns * C, (T)0);
            }
        return frame - (top * columns + left) * C;
    }

    // How far a patch's elements are from its place's own pixel.
    std::vector<int64_t> places() const {
        std::vector<int64_t> found;
        found.reserve(depth());
        for (const dp_Tap<T> &tap : taps)
            for (int64_t c = 0; c < C; ++c) found.push_back((tap.row * columns + tap.column) * C + c);
        return found;
    }
};

}  // namespace

#endif
