// Reads calls from standard input, hands them to `run` and answers with what their buffers then hold.
//
// A call: "NAME SEED NUMBERS BUFFERS\n", the numbers in one line, and per buffer "BYTES\n" and the bytes, -1 for a null
// pointer. Every buffer is an allocation of its own, so that AddressSanitizer sees a byte too far.
#pragma once
#include <iostream>
#include <sstream>
#include <string>

struct Call {
  std::string name;
  std::vector<double> numbers;
  std::vector<std::unique_ptr<char[]>> buffers;
  std::vector<int64_t> sizes;
  mutable size_t number = 0, buffer = 0;

  double next() const { return numbers.at(number++); }
  int64_t integer() const { return (int64_t)next(); }
  template <class T> T* data() const { return reinterpret_cast<T*>(buffers.at(buffer++).get()); }
};

// Makes one call; not 0: its name or its launch is wrong.
int run(const Call& c);

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    Call call;
    size_t numbers = 0, buffers = 0;
    std::istringstream(line) >> call.name >> emulator::machine().seed >> numbers >> buffers;
    std::getline(std::cin, line);
    std::istringstream in(line);
    call.numbers.resize(numbers);
    for (double& number : call.numbers) in >> number;
    for (size_t i = 0; i < buffers; ++i) {
      std::getline(std::cin, line);
      const int64_t size = std::stoll(line);
      call.sizes.push_back(size);
      call.buffers.emplace_back(size < 0 ? nullptr : new char[size]);
      if (size > 0) std::cin.read(call.buffers.back().get(), size);
    }
    const int code = run(call);
    if (code) {
      std::cerr << call.name << ": code " << code << "\n";
      return 1;
    }
    for (size_t i = 0; i < buffers; ++i)
      if (call.sizes[i] > 0) std::cout.write(call.buffers[i].get(), call.sizes[i]);
    std::cout.flush();
  }
  return 0;
}
