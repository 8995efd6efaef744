"""Questions for a target to answer, from which a draft head learns how it writes: combinations of a few phrases, none
of them about what ``prompts.jsonl`` asks for."""

import itertools
import random
from collections.abc import Iterator

LANGUAGES = (
    "Python",
    "Python",
    "Python",
    "JavaScript",
    "TypeScript",
    "Java",
    "C++",
    "C",
    "Go",
    "Rust",
    "SQL",
    "Bash",
    "Ruby",
    "C#",
)
PROGRAMS = (
    "computes the greatest common divisor of two integers",
    "checks whether a number is prime",
    "lists all primes below n with a sieve",
    "computes Fibonacci numbers with memoisation",
    "sorts a list by bubble sort",
    "sorts a list by merge sort",
    "sorts a list by quicksort",
    "finds the median of a list of numbers",
    "counts how often each word occurs in a file",
    "checks whether two strings are anagrams",
    "checks whether a string is a palindrome",
    "finds the longest common prefix of some strings",
    "finds the longest common subsequence of two strings",
    "computes the edit distance of two strings",
    "converts a Roman numeral to an integer",
    "converts an integer to binary without library functions",
    "validates an e-mail address",
    "parses a CSV file and sums a column",
    "reads a JSON file and prints all keys",
    "writes a list of records to a CSV file",
    "removes duplicates from a list and keeps the order",
    "rotates a matrix by 90 degrees",
    "multiplies two matrices",
    "transposes a matrix",
    "finds the shortest path in a grid by breadth-first search",
    "walks over a directory and sums the sizes of its files",
    "counts the islands in a grid of zeros and ones",
    "solves the knapsack problem by dynamic programming",
    "finds two numbers of a list that add up to a target",
    "finds the maximum sum of a contiguous part of a list",
    "implements a stack with push, pop and peek",
    "implements a queue with two stacks",
    "implements a binary search tree with insert and lookup",
    "walks over a binary tree in order, without recursion",
    "finds the depth of a binary tree",
    "implements a hash map with chaining",
    "implements a min-heap",
    "generates all permutations of a list",
    "generates all subsets of a list",
    "solves the eight queens puzzle",
    "solves a sudoku by backtracking",
    "encrypts a text with the Caesar cipher",
    "computes a checksum of a file",
    "fetches a web page and prints its title",
    "sends a POST request with JSON and handles errors",
    "implements a rate limiter",
    "implements a simple event emitter",
    "implements a thread-safe counter",
    "runs several tasks at once and collects their results",
    "logs messages with a time stamp to a file",
    "parses command line arguments for input and output files",
    "reads settings from environment variables with defaults",
    "connects to a SQLite database and creates a table of users",
    "inserts, updates and deletes rows of a table of products",
    "joins a table of orders with one of customers and sums by month",
    "formats a date as year, month and day",
    "computes the number of days between two dates",
    "computes a person's age from the date of birth",
    "converts temperatures between Celsius and Fahrenheit",
    "computes the distance between two points on a sphere",
    "simulates the throw of two dice and plots a histogram",
    "plays tic-tac-toe on the command line",
    "implements Conway's game of life",
    "draws a triangle of asterisks",
    "trains a linear regression by gradient descent",
    "computes the cosine similarity of two vectors",
    "clusters points by k-means",
    "splits data into a training and a test set",
    "normalises the columns of a table",
    "resizes all images in a folder",
    "renames files in a folder by a pattern",
    "compresses a text by run-length encoding",
    "builds a Huffman code of a text",
    "evaluates an arithmetic expression in reverse Polish notation",
    "converts infix notation to postfix notation",
    "implements a linked list with insertion and deletion",
    "detects a cycle in a linked list",
    "sorts a directed graph topologically",
    "finds connected components with union-find",
    "computes all shortest paths by Floyd and Warshall",
)
ASKS = (
    "Write a {language} function that {program}.",
    "Write {language} code that {program}, with comments.",
    "Write a {language} program that {program}, and show an example of its use.",
    "How would you write something in {language} that {program}? Explain it step by step.",
    "Implement in {language} what {program}, and add tests for it.",
    "Show two ways in {language} to write code that {program}, and compare them.",
)
TOPICS = (
    *(
        "photosynthesis",
        "tides",
        "earthquakes",
        "black holes",
        "the water cycle",
        "bees",
        "volcanoes",
        "the moon's phases",
    ),
    *("inflation", "insurance", "taxes", "credit cards", "stocks", "budgets", "the stock exchange", "exchange rates"),
    *(
        "baking bread",
        "growing tomatoes",
        "repairing a bicycle",
        "painting a room",
        "packing for a hike",
        "making soup",
    ),
    *(
        "the Roman Empire",
        "the printing press",
        "the Silk Road",
        "the Renaissance",
        "the industrial revolution",
        "the Vikings",
    ),
    *("memory", "stress", "habits", "friendship", "motivation", "learning a language", "public speaking", "meditation"),
    *("solar panels", "electric cars", "batteries", "wind turbines", "the internet", "GPS", "radio", "satellites"),
    *("unit tests", "version control", "code reviews", "databases", "caching", "encryption", "APIs", "containers"),
    *("poetry", "jazz", "opera", "photography", "architecture", "film", "theatre", "sculpture"),
)
ABOUT = (
    "Explain {topic} to a beginner.",
    "What are three common mistakes people make about {topic}?",
    "Write a short article about {topic}, three paragraphs.",
    "Give me ten facts about {topic} as a list.",
    "Write a dialogue between a teacher and a pupil about {topic}.",
    "What should I read or try first to learn about {topic}, and why?",
)


def questions(seed: int = 0) -> Iterator[str]:
    """Questions without an end, in an order of their own for each seed: three about code for one that is not."""
    code = [
        ask.format(language=language, program=program)
        for ask, language, program in itertools.product(ASKS, LANGUAGES, PROGRAMS)
    ]
    others = [ask.format(topic=topic) for ask, topic in itertools.product(ABOUT, TOPICS)]
    rng = random.Random(seed)
    for questions_ in (code, others):
        rng.shuffle(questions_)
    for i in itertools.count():
        yield others[i // 4 % len(others)] if i % 4 == 3 else code[(i - i // 4) % len(code)]
