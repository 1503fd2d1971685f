// burst is one of several sandboxes that work in bursts, with waits between them,
// on memory that much resembles that of its siblings. It looks at a page before it
// writes to it, and at others. It answers lines:
//
//   go ID    work until told to stop; the IDs of siblings differ
//   alive    say OK
//   check    stop, and compare all memory with what was last written
//
//   burst --mb=12
//
// Half of the memory is filled when it says READY, for the template.

#include "guest.h"

#include <poll.h>

// A page holds what page_content says, in siblings alike, and then some words
// that differ between them.
struct mine {
  struct page like;
  uint32_t words;
  uint64_t word;  // follows from ID and time of writing
};

static uint8_t *mem;
static struct mine *model;
static size_t pages;
static uint64_t id, serial;

static void word_at(const struct mine *m, unsigned k, uint16_t *off, uint64_t *val) {
  *val = mix(m->word + k);
  *off = mix(*val) % 512 * 8;
}

static void content(uint8_t *p, const struct mine *m) {
  page_content(p, &m->like);
  for (unsigned k = 0; k < m->words; k++) {
    uint16_t off;
    uint64_t val;
    word_at(m, k, &off, &val);
    memcpy(p + off, &val, 8);
  }
}

static void verify(size_t i) {
  uint8_t want[PAGE];
  const uint8_t *got = mem + i * PAGE;
  const struct mine *m = &model[i];
  content(want, m);
  if (!memcmp(want, got, PAGE)) return;
  size_t first = PAGE, last = 0;
  for (size_t o = 0; o < PAGE; o++)
    if (got[o] != want[o]) {
      if (first == PAGE) first = o;
      last = o;
    }
  fail("page %zu is not what was written: bytes %zu to %zu; ver=%u words=%u serial=%llu%s", i, first, last,
       m->like.ver, m->words, (unsigned long long)serial, all_zero(got, PAGE) ? "; it is zero" : "");
}

static void set(size_t i, uint64_t key, uint32_t ver, uint32_t words) {
  model[i] = (struct mine){{mix(key), ver, 0, 0}, words, mix(id) ^ mix(serial++)};
  content(mem + i * PAGE, &model[i]);
}

static void change(struct rng *g, size_t i) {
  // Few versions, so that siblings come to have the same ones.
  uint32_t ver = 2 + below(g, 3);
  switch (below(g, 20)) {
    case 0 ... 7:  // equal to a sibling's
      set(i, i, ver, 0);
      break;
    case 8 ... 11:  // nearly so
      set(i, i, ver, 1 + below(g, 6));
      break;
    case 12:  // equal to the template's
      set(i, i, 1, 0);
      break;
    case 13 ... 14:  // nearly so
      set(i, i, 1, 1 + below(g, 6));
      break;
    case 15:  // equal to what a sibling has elsewhere
      set(i, below(g, pages), ver, 0);
      break;
    case 16:  // its own
      set(i, mix(id) + serial, ver, 0);
      break;
    default:  // one more word, and nothing else is written
      if (model[i].like.ver == 0 || model[i].words >= 24) {
        set(i, i, ver, 0);
        break;
      }
      uint16_t off;
      uint64_t val;
      word_at(&model[i], model[i].words++, &off, &val);
      *(volatile uint64_t *)(mem + i * PAGE + off) = val;
  }
}

static void burst(struct rng *g) {
  for (int runs = 1 + below(g, 12); runs > 0; runs--) {
    size_t i = below(g, pages), n = 1 + below(g, 64);
    int write = below(g, 3) != 0;
    for (; n > 0 && i < pages; n--, i++) {
      verify(i);
      if (write) change(g, i);
    }
  }
}

static int read_line(char *buf, size_t size) {
  size_t n = 0;
  while (n + 1 < size) {
    ssize_t r = read(0, buf + n, 1);
    if (r < 0 && errno == EINTR) continue;
    if (r <= 0) return 0;
    if (buf[n] == '\n') break;
    n++;
  }
  buf[n] = 0;
  return 1;
}

int main(int argc, char **argv) {
  prog_name = "burst";
  pages = opt_num(argc, argv, "mb", 12) * 256;
  mem = map_or_die(pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  model = calloc(pages, sizeof *model);
  must(model, "calloc");
  for (size_t i = 0; i < pages / 2; i++) set(i, i, 1, 0);
  setvbuf(stdout, NULL, _IOLBF, 0);
  puts("READY");
  struct rng g = {0};
  int working = 0;
  for (;;) {
    // Most waits are about as long as an eviction takes, few much longer.
    int wait = !working ? -1 : below(&g, 8) ? 10 + (int)below(&g, 300) : 1000;
    struct pollfd in = {0, POLLIN, 0};
    int n = poll(&in, 1, wait);
    if (n < 0 && errno == EINTR) continue;
    must(n >= 0, "poll");
    if (n == 0) {
      burst(&g);
      continue;
    }
    char line[64];
    unsigned long long num;
    if (!read_line(line, sizeof line)) return 0;
    if (sscanf(line, "go %llu", &num) == 1) {
      id = num;
      g.s = mix(id);
      working = 1;
    } else if (!strcmp(line, "check")) {
      working = 0;
      for (size_t i = 0; i < pages; i++) verify(i);
    } else if (strcmp(line, "alive")) {
      fail("unknown request %s", line);
    }
    puts("OK");
  }
}
