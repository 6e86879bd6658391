// Hashes of contexts, and a table from them to numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "both.h"

namespace neap::draft {

// A number of this process with which hashes of a client's contexts begin: otherwise it could choose contexts that all
// have the same place in a table.
inline uint64_t secret() {
  static const uint64_t number = (uint64_t)std::random_device{}() << 32 | std::random_device{}();
  return number;
}

// Open addressing with linear probing. Nothing is removed. Keys of different contexts are taken for different ones.
class HashTable {
 public:
  // The value of a key, or null.
  int32_t* find(uint64_t key) {
    if (slots_.empty()) return nullptr;
    Slot& slot = at(key);
    return slot.is_used ? &slot.value : nullptr;
  }

  // The value of a key and whether it is new; if it is, it has this value.
  std::pair<int32_t*, bool> insert(uint64_t key, int32_t value) {
    if ((size_ + 1) * 3 > slots_.size() * 2) grow();
    Slot& slot = at(key);
    const bool is_new = !slot.is_used;
    if (is_new) {
      slot = {key, value, true};
      ++size_;
    }
    return {&slot.value, is_new};
  }

 private:
  struct Slot {
    uint64_t key = 0;
    int32_t value = 0;
    bool is_used = false;
  };

  Slot& at(uint64_t key) {
    size_t place = key & (slots_.size() - 1);
    while (slots_[place].is_used && slots_[place].key != key) place = (place + 1) & (slots_.size() - 1);
    return slots_[place];
  }

  void grow() {
    std::vector<Slot> old(slots_.empty() ? 64 : 2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.is_used) at(slot.key) = slot;
  }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace neap::draft
