// server holds a given amount of memory, like an agent's interpreter with its
// data, and answers lines: "ping" looks at a little of it, "step" does what one
// step of work does (reads a fifth, writes a fiftieth), "sum" reads all.
//
//   server --mb=300 --tmpfs=30
//
// mb is private memory, tmpfs how many MiB files in tmpfs have besides.

#include "guest.h"

static uint8_t *mem;
static size_t pages, file_pages;
static int fd;

static uint64_t look(const uint8_t *p) {
  uint64_t h = 0;
  for (size_t i = 0; i < PAGE / 8; i += 8) h = mix(h ^ ((const uint64_t *)p)[i]);
  return h;
}

static void content(uint8_t *p, uint64_t h) {
  switch (h % 10) {
    case 0:
      gen_random(p, PAGE, h);
      break;
    case 1:
    case 2:
    case 3:
    case 4:
      gen_text(p, PAGE, h);
      break;
    default:
      gen_words(p, PAGE, h);
  }
  memcpy(p, &h, 8);
}

int main(int argc, char **argv) {
  prog_name = "server";
  pages = opt_num(argc, argv, "mb", 300) * 256;
  file_pages = opt_num(argc, argv, "tmpfs", 0) * 256;
  mem = map_or_die(pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  for (size_t i = 0; i < pages; i++) content(mem + i * PAGE, mix(i));
  fd = open("/dev/shm/data", O_RDWR | O_CREAT, 0600);
  must(fd >= 0, "open");
  uint8_t b[PAGE];
  for (size_t i = 0; i < file_pages; i++) {
    content(b, mix(i + pages));
    must(pwrite(fd, b, PAGE, i * PAGE) == (ssize_t)PAGE, "pwrite");
  }
  struct rng g = {1};
  uint64_t steps = 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  puts("READY");
  char line[64];
  while (fgets(line, sizeof line, stdin)) {
    uint64_t h = 0;
    if (!strncmp(line, "ping", 4)) {
      // A working set: here and there some neighbours.
      for (size_t k = 0; k < 16; k++)
        for (size_t i = 0, at = below(&g, pages - 8); i < 8; i++) h = mix(h ^ look(mem + (at + i) * PAGE));
      for (size_t k = 0; k < 4; k++) ((uint64_t *)(mem + below(&g, pages) * PAGE))[1] = h;
    } else if (!strncmp(line, "step", 4)) {
      steps++;
      for (size_t k = 0; k < pages / 5 / 16; k++)
        for (size_t i = 0, at = below(&g, pages - 16); i < 16; i++) h = mix(h ^ look(mem + (at + i) * PAGE));
      for (size_t k = 0; k < pages / 50 / 8; k++)
        for (size_t i = 0, at = below(&g, pages - 8); i < 8; i++) content(mem + (at + i) * PAGE, mix(h + i));
      for (size_t k = 0; k < file_pages / 10; k++) {
        must(pread(fd, b, PAGE, below(&g, file_pages) * PAGE) == (ssize_t)PAGE, "pread");
        h = mix(h ^ look(b));
      }
    } else if (!strncmp(line, "sum", 3)) {
      for (size_t i = 0; i < pages; i++) h = mix(h ^ look(mem + i * PAGE));
    } else {
      break;
    }
    printf("OK %016llx\n", (unsigned long long)h);
  }
  return 0;
}
