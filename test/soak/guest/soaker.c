// soaker does one step of work for each line that it gets, and answers with a number
// that whoever asked computes, too, without it:
//
//   write SEED N        change N runs of pages, and look at them before
//   sum                 read all memory
//   burst SEED N WIDE   N short processes, at most WIDE at once
//   crowd SEED N        N processes that all live at the same time
//   files SEED N        write N files, read them, rename and remove them
//   threads SEED N      N threads with a stack of their own and a lock in common
//   pipes SEED N        send N words through two pipes and a process between them
//
// The answer is "OK NUMBER". What does not have the content that it was given says
// FAIL at once.
//
//   soaker --mb=8

#include "guest.h"

#define WORDS (PAGE / 8)

static uint64_t *mem;
static uint32_t *version;
static size_t pages;

static uint64_t key_of(uint64_t where, uint64_t ver) { return mix(mix(where) ^ ver); }

// word is word k of what has the key h: nearly empty, a table, of no pattern, or
// constant.
static uint64_t word(uint64_t h, size_t k) {
  switch (h & 3) {
    case 0:
      return k % 64 ? 0 : mix(h + k);
    case 1:
      return h + k / 64 * 16;
    case 2:
      return mix(h + k);
    default:
      return (h >> 8 & 0xff) * 0x0101010101010101ULL;
  }
}

static void fill(uint64_t *p, size_t n, uint64_t h) {
  for (size_t k = 0; k < n; k++) p[k] = word(h, k);
}

// look compares n words with what they must be, and adds them to a sum.
static uint64_t look(const uint64_t *p, size_t n, uint64_t h, uint64_t sum, const char *what) {
  for (size_t k = 0; k < n; k++) {
    uint64_t got = p[k];
    if (got != word(h, k))
      fail("%s: word %zu is %016llx, not %016llx", what, k, (unsigned long long)got, (unsigned long long)word(h, k));
    sum = (sum ^ got) * 0x9e3779b97f4a7c15ULL;
  }
  return sum;
}

static uint64_t look_at_page(size_t i, uint64_t sum) {
  char what[32];
  snprintf(what, sizeof what, "page %zu", i);
  return look(mem + i * WORDS, WORDS, key_of(i, version[i]), sum, what);
}

static uint64_t do_write(uint64_t seed, size_t n) {
  struct rng g = {seed};
  uint64_t sum = 0;
  while (n--) {
    size_t i = below(&g, pages), run = 1 + below(&g, 16);
    for (; run && i < pages; run--, i++) {
      sum = look_at_page(i, sum);
      fill(mem + i * WORDS, WORDS, key_of(i, ++version[i]));
    }
  }
  return sum;
}

static uint64_t do_sum(void) {
  uint64_t sum = 0;
  for (size_t i = 0; i < pages; i++) sum = look_at_page(i, sum);
  return sum;
}

// result is what the short process i says.
static uint64_t result(uint64_t seed, size_t i) { return mix(mix(seed) ^ i); }

static void put(int fd, const void *p, size_t n) {
  while (n) {
    ssize_t w = write(fd, p, n);
    if (w < 0 && errno == EINTR) continue;
    must(w > 0, "write");
    p = (const char *)p + w;
    n -= w;
  }
}

static void get(int fd, void *p, size_t n) {
  while (n) {
    ssize_t r = read(fd, p, n);
    if (r < 0 && errno == EINTR) continue;
    must(r > 0, "read");
    p = (char *)p + r;
    n -= r;
  }
}

// Of three short processes one reads memory that it has in common with its parent, one
// writes to it, and one becomes another program.
static pid_t shorty(const char *self, uint64_t seed, size_t i, int fd) {
  pid_t pid = fork();
  must(pid >= 0, "fork");
  if (pid) return pid;
  if (i % 3 == 2) {
    char a[24], b[24], c[12];
    snprintf(a, sizeof a, "%llu", (unsigned long long)seed);
    snprintf(b, sizeof b, "%zu", i);
    snprintf(c, sizeof c, "%d", fd);
    execl(self, self, "shorty", a, b, c, NULL);
    die("execl");
  }
  size_t at = result(seed, i) % pages;
  look_at_page(at, 0);
  if (i % 3 == 1) {
    version[at]++;
    fill(mem + at * WORDS, WORDS, key_of(at, version[at]));
    look_at_page(at, 0);
  }
  uint64_t r = result(seed, i);
  put(fd, &r, sizeof r);
  _exit(0);
}

static uint64_t do_burst(const char *self, uint64_t seed, size_t n, size_t wide) {
  int fd[2];
  must(pipe(fd) == 0, "pipe");
  uint64_t sum = 0, r;
  size_t begun = 0, alive = 0;
  while (begun < n || alive) {
    if (begun < n && alive < wide) {
      shorty(self, seed, begun++, fd[1]);
      alive++;
      continue;
    }
    int status;
    pid_t pid = wait(&status);
    must(pid > 0, "wait");
    if (status) fail("process %d ended with status %#x", pid, status);
    alive--;
    get(fd[0], &r, sizeof r);
    sum += r;
  }
  close(fd[0]);
  close(fd[1]);
  return sum;
}

static uint64_t do_crowd(uint64_t seed, size_t n) {
  int there[2], back[2];
  must(pipe(there) == 0 && pipe(back) == 0, "pipe");
  for (size_t i = 0; i < n; i++) {
    pid_t pid = fork();
    must(pid >= 0, "fork");
    if (pid) continue;
    uint64_t go, r = result(seed, i);
    get(there[0], &go, sizeof go);
    put(back[1], &r, sizeof r);
    _exit(0);
  }
  uint64_t sum = 0, r = 0;
  for (size_t i = 0; i < n; i++) put(there[1], &r, sizeof r);
  for (size_t i = 0; i < n; i++) {
    int status;
    get(back[0], &r, sizeof r);
    sum += r;
    must(wait(&status) > 0 && status == 0, "wait");
  }
  close(there[0]), close(there[1]), close(back[0]), close(back[1]);
  return sum;
}

static uint64_t do_files(uint64_t seed, size_t n) {
  static uint64_t buf[16 * WORDS];
  static const char *const dirs[] = {"/dev/shm", "/var/tmp"};
  struct rng g = {seed};
  uint64_t sum = 0;
  for (size_t i = 0; i < n; i++) {
    size_t len = 1 + below(&g, 16 * WORDS);
    uint64_t h = rnd(&g);
    char old[64], path[64];
    snprintf(old, sizeof old, "%s/soak-%zu.new", dirs[i % 2], i);
    snprintf(path, sizeof path, "%s/soak-%zu", dirs[i % 2], i);
    int fd = open(old, O_RDWR | O_CREAT | O_EXCL, 0600);
    must(fd >= 0, old);
    fill(buf, len, h);
    put(fd, buf, len * 8);
    must(close(fd) == 0, "close");
    must(rename(old, path) == 0, "rename");
    memset(buf, 0xff, sizeof buf);
    fd = open(path, O_RDONLY);
    must(fd >= 0, path);
    get(fd, buf, len * 8);
    must(close(fd) == 0, "close");
    sum = look(buf, len, h, sum, path);
    must(unlink(path) == 0, "unlink");
    struct stat st;
    must(stat(path, &st) < 0 && errno == ENOENT, "a removed file");
  }
  return sum;
}

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static uint64_t thread_sum;

struct job {
  uint64_t seed;
  size_t i;
};

static void *thread(void *arg) {
  const struct job *j = arg;
  uint64_t stack[8 * WORDS], h = result(j->seed, j->i);
  fill(stack, 8 * WORDS, h);
  sched_yield();
  uint64_t sum = look(stack, 8 * WORDS, h, 0, "a thread's stack");
  pthread_mutex_lock(&mu);
  thread_sum += sum;
  pthread_mutex_unlock(&mu);
  return NULL;
}

static uint64_t do_threads(uint64_t seed, size_t n) {
  enum { MOST = 64 };
  pthread_t t[MOST];
  struct job j[MOST];
  must(n <= MOST, "so many threads");
  thread_sum = 0;
  for (size_t i = 0; i < n; i++) {
    j[i] = (struct job){seed, i};
    must(pthread_create(&t[i], NULL, thread, &j[i]) == 0, "pthread_create");
  }
  for (size_t i = 0; i < n; i++) must(pthread_join(t[i], NULL) == 0, "pthread_join");
  return thread_sum;
}

static uint64_t do_pipes(uint64_t seed, size_t n) {
  int there[2], back[2];
  must(pipe(there) == 0 && pipe(back) == 0, "pipe");
  pid_t pid = fork();
  must(pid >= 0, "fork");
  uint64_t w;
  if (!pid) {
    close(there[1]);
    for (size_t i = 0; i < n; i++) {
      get(there[0], &w, sizeof w);
      w = mix(w);
      put(back[1], &w, sizeof w);
    }
    _exit(0);
  }
  uint64_t sum = 0;
  for (size_t i = 0; i < n; i++) {
    w = result(seed, i);
    put(there[1], &w, sizeof w);
    get(back[0], &w, sizeof w);
    sum = mix(sum ^ w);
  }
  int status;
  must(waitpid(pid, &status, 0) == pid && status == 0, "waitpid");
  close(there[0]), close(there[1]), close(back[0]), close(back[1]);
  return sum;
}

int main(int argc, char **argv) {
  prog_name = "soaker";
  if (argc == 5 && !strcmp(argv[1], "shorty")) {
    uint64_t r = result(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
    put(atoi(argv[4]), &r, sizeof r);
    return 0;
  }
  pages = opt_num(argc, argv, "mb", 8) * 256;
  mem = map_or_die(pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  version = calloc(pages, sizeof *version);
  must(version, "calloc");
  for (size_t i = 0; i < pages; i++) fill(mem + i * WORDS, WORDS, key_of(i, 0));
  setvbuf(stdout, NULL, _IOLBF, 0);
  puts("READY");
  char line[128];
  while (fgets(line, sizeof line, stdin)) {
    char what[16];
    unsigned long long seed = 0, n = 0, wide = 0, answer;
    if (sscanf(line, "%15s %llu %llu %llu", what, &seed, &n, &wide) < 1) fail("no request in %s", line);
    if (!strcmp(what, "write"))
      answer = do_write(seed, n);
    else if (!strcmp(what, "sum"))
      answer = do_sum();
    else if (!strcmp(what, "burst"))
      answer = do_burst(argv[0], seed, n, wide);
    else if (!strcmp(what, "crowd"))
      answer = do_crowd(seed, n);
    else if (!strcmp(what, "files"))
      answer = do_files(seed, n);
    else if (!strcmp(what, "threads"))
      answer = do_threads(seed, n);
    else if (!strcmp(what, "pipes"))
      answer = do_pipes(seed, n);
    else
      fail("unknown request %s", line);
    printf("OK %llu\n", answer);
  }
  return 0;
}
