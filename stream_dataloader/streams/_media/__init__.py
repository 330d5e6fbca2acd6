"""What streams of media files share. Open `section` first; it imports `errors` alone."""
