// Serves the native backend to another process: reads requests from stdin, answers on stdout.
//
// qemu.py links it with library.cpp for processors that run under QEMU, where there is no torch to
// compare with. A request is a 32-bit number and what the function of that name below reads.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "abi.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t PAGE_BYTES = 1024;
constexpr uint8_t POISON = 0x5b;
constexpr int OVERRUN = -2;  // in place of a result: something beyond the elements was written

void read_bytes(void* to, size_t count) {
  if (count && std::fread(to, 1, count, stdin) != count) std::exit(1);
}

void write_bytes(const void* from, size_t count) { std::fwrite(from, 1, count, stdout); }

template <class T>
T read() {
  T value;
  read_bytes(&value, sizeof value);
  return value;
}

template <class T>
void write(T value) {
  write_bytes(&value, sizeof value);
}

void write_text(const char* text) {
  write(static_cast<int32_t>(std::strlen(text)));
  write_bytes(text, std::strlen(text));
}

// Elements at an address that is a multiple of 4 alone, between poisoned bytes.
class Elements {
 public:
  explicit Elements(size_t count) : count_(count), all_(count + BEFORE + AFTER, POISON) {
    read_bytes(data(), count_);
  }
  uint8_t* data() { return all_.data() + BEFORE; }
  void answer() const { write_bytes(all_.data() + BEFORE, count_); }
  bool overrun() const {
    for (size_t i = 0; i < all_.size(); ++i) {
      if ((i < BEFORE || i >= BEFORE + count_) && all_[i] != POISON) return true;
    }
    return false;
  }

 private:
  static constexpr size_t BEFORE = 64 + 4, AFTER = 64;
  size_t count_;
  Bytes all_;
};

// A codebook's arrays, which must outlive the daf_book.
struct Book {
  Bytes lut;
  std::vector<float> tables[9];
  daf_book* native;
};

std::vector<std::unique_ptr<Book>> books;

void describe() {
  for (size_t size : {sizeof(daf_codebook), sizeof(daf_layout), sizeof(daf_mersenne)}) {
    write(static_cast<int32_t>(size));
  }
  write(static_cast<int32_t>(daf_abi_version()));
  write_text(daf_isa());
  write_text(daf_compiler());
}

void make_book() {
  auto source = read<daf_codebook>();
  auto book = std::make_unique<Book>();
  if (source.lut) {
    book->lut.resize(static_cast<size_t>(source.cells));
    read_bytes(book->lut.data(), book->lut.size());
    source.lut = book->lut.data();
  }
  for (int bits = 0; bits <= 8; ++bits) {
    book->tables[bits].resize(size_t{1} << bits);
    read_bytes(book->tables[bits].data(), sizeof(float) << bits);
    source.tables[bits] = book->tables[bits].data();
  }
  book->native = daf_book_create(&source);
  books.push_back(std::move(book));
}

void run(bool encode) {
  auto layout = read<daf_layout>();
  const auto book = read<int32_t>(), bits = read<int32_t>(), dtype = read<int32_t>();
  const auto threads = read<int32_t>(), pages = read<int32_t>(), segments = read<int32_t>();
  const auto pages_per_segment = read<int64_t>(), bytes = read<int64_t>();
  layout.book = books[static_cast<size_t>(book)]->native;
  std::vector<int32_t> table(static_cast<size_t>(pages));
  read_bytes(table.data(), table.size() * sizeof(int32_t));
  std::vector<Bytes> memory(static_cast<size_t>(segments));
  std::vector<int64_t> pointers;
  for (Bytes& segment : memory) {
    segment.resize(static_cast<size_t>(pages_per_segment) * PAGE_BYTES);
    read_bytes(segment.data(), segment.size());
    pointers.push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(segment.data())));
  }
  Elements elements(static_cast<size_t>(bytes));
  const int result = encode ? daf_encode(&layout, bits, dtype, elements.data(), table.data(),
                                         pointers.data(), pages_per_segment, threads)
                            : daf_decode(&layout, bits, dtype, elements.data(), table.data(),
                                         pointers.data(), pages_per_segment, threads);
  write(static_cast<int32_t>(elements.overrun() ? OVERRUN : result));
  if (encode) {
    for (const Bytes& segment : memory) write_bytes(segment.data(), segment.size());
  } else {
    elements.answer();
  }
}

void begin_noise() {
  Bytes state(5056);
  read_bytes(state.data(), state.size());
  daf_mersenne engine{};
  write(static_cast<int32_t>(daf_noise_begin(&engine, state.data())));
  write(engine);
}

void draw_noise() {
  auto engine = read<daf_mersenne>();
  const auto count = read<int64_t>();
  const auto threshold = read<uint64_t>();
  const auto width = read<int32_t>();
  const auto value = read<uint32_t>();
  Elements elements(static_cast<size_t>(count * width));
  daf_noise(&engine, count, threshold, width, value, elements.data());
  write(static_cast<int32_t>(elements.overrun() ? OVERRUN : 1));
  write(engine);
  elements.answer();
}

}  // namespace

int main() {
  int32_t request;
  while (std::fread(&request, sizeof request, 1, stdin) == 1) {
    switch (request) {
      case 0: describe(); break;
      case 1: make_book(); break;
      case 2: run(true); break;
      case 3: run(false); break;
      case 4: begin_noise(); break;
      case 5: draw_noise(); break;
      default: return 1;
    }
    std::fflush(stdout);
  }
  return 0;
}
